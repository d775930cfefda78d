"""What a data source writes belongs to the checkpoint, whatever its files are called."""

import inspect

import pytest

from slime.config import load_config
from slime.config.weight_movement import frozen_urls
from slime.errors import EngineError
from slime.ray.rollout_manager import RolloutManager, _check_versions
from slime.rollout import unfinished
from slime.rollout.data_source import RolloutDataSource
from slime.rollout.session import SESSION
from slime.rollout.state import slots_of
from slime.utils.parts import faults
from slime.utils.types import Sample
from tests.tiny import tiny_model_dir


class TwoFiles(RolloutDataSource):
    """Writes one file a step, and one that every step writes over."""

    def save(self, rollout_id):
        folder = self.args.path_of_state
        (folder / "deep").mkdir(parents=True, exist_ok=True)
        (folder / "deep" / f"{rollout_id}.bin").write_bytes(b"x" * rollout_id)
        (folder / "index").write_text(f"{rollout_id:03d}")


def manager(tmp_path, source):
    save = tmp_path / "checkpoint"
    words = {
        "hf-checkpoint": tiny_model_dir(tmp_path / "model"),
        "num-rollout": 30,
        "rollout-batch-size": 2,
        "n-samples-per-prompt": 2,
        "rollout-max-response-len": 4,
        "rm-type": "random",
        "save": save,
        "data-source-path": source,
    }
    flags = [word for name, value in words.items() for word in (f"--{name}", str(value))]
    config = load_config([*flags, "--disable-rollout-global-dataset"])
    made = RolloutManager(config)
    made._args.path_of_state = save / "mine"
    made.start()
    return save, made


def test_files_with_the_number_of_the_step_belong_to_it_and_one_that_is_written_over_does_not(tmp_path):
    save, made = manager(tmp_path, f"{__name__}.TwoFiles")
    (save / "step_000002").mkdir(parents=True)
    (save / "notes_2").write_text("of the user")
    (save / "mine" / "deep").mkdir(parents=True)
    for step in (1, 2, 12):
        (save / "mine" / "deep" / "2.bin").write_text("of an earlier run")
        parts = made.save(step)
        assert [part.path for part in parts] == [f"mine/deep/{step}.bin"]
        assert faults(save, parts) == []


def test_the_data_position_is_one_file(tmp_path):
    save, made = manager(tmp_path, "slime.rollout.data_source.RolloutDataSourceWithBuffer")
    assert [part.path for part in made.save(0)] == ["rollout/data_source_0.json"]
    assert [part.path for part in made.save(0)] == ["rollout/data_source_0.json"]
    assert faults(save, made.save(1)) == []


def test_groups_in_flight_that_another_run_left_are_not_given_out(tmp_path):
    save, made = manager(tmp_path, "slime.rollout.data_source.RolloutDataSourceWithBuffer")
    unfinished.save(save, 3, [[Sample(index=7, group_index=7, prompt="of another run")]])
    made.save(3)
    made._args = made._args.with_values(load=str(save))
    made.load(3)
    assert made._source.buffer == []


def test_what_an_engine_sampled_without_weights_of_the_run_does_not_train(monkeypatch):
    sample = Sample(index=7, weight_versions=["3", "default"])
    monkeypatch.setattr(SESSION, "version", None)
    _check_versions([sample])
    monkeypatch.setattr(SESSION, "version", 3)
    _check_versions([Sample(index=1, weight_versions=["3"])])
    with pytest.raises(EngineError, match="sample 7 was sampled by weights of no version, and version 3 was"):
        _check_versions([sample])


def test_a_manager_has_the_slots_of_all_engines_that_it_is_connected_to(tmp_path):
    _, made = manager(tmp_path, "slime.rollout.data_source.RolloutDataSourceWithBuffer")
    assert slots_of(made._args) == 512
    made.connect({"default": ("127.0.0.1", 1), "judge": ("127.0.0.1", 2)}, 3, ["judge"])
    assert slots_of(made._args) == 3 * 512
    assert frozen_urls(made._args) == {"http://127.0.0.1:2"}


def test_no_method_is_a_coroutine_since_ray_would_run_all_of_them_on_one_event_loop():
    methods = inspect.getmembers(RolloutManager, inspect.isfunction)
    assert not [name for name, method in methods if inspect.iscoroutinefunction(method)]

"""Updates that fail: whom they leave out, what is found before the pause, and whom an error names."""

from dataclasses import replace

import pytest

from slime.errors import DeadlineError, EngineError
from slime.serving.weights import client
from tests.serving.clock import Clock
from tests.serving.weights.pool import (
    ModelSource,
    StrikingSource,
    check,
    engines,
    hanging,
    make,
    no_room,
    scores,
)
from tests.tiny import tiny_model, tiny_model_dir


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model_dir(tmp_path_factory.mktemp("model") / "m", seed=0)


def test_shared_memory_that_is_too_small_is_found_before_engines_pause(folder):
    with engines(folder) as pool, no_room():
        before = scores(pool[0][1].url)
        sync = make(folder, ModelSource(tiny_model(seed=3)), "tensor", engine_kind="sglang")
        sync.connect([endpoint for _, endpoint in pool])
        with pytest.raises(EngineError, match=r"cannot set aside \d+ bytes") as caught:
            sync.update(1, "abort")
        assert "stay paused" not in str(caught.value)
        assert scores(pool[0][1].url) == before
        sync.close()


@pytest.mark.parametrize("kind", [EngineError, DeadlineError, RuntimeError])
@pytest.mark.parametrize("external", [True, False])
def test_whatever_ends_an_update_names_the_engines_of_others_that_stay_paused(folder, kind, external):
    source = StrikingSource(tiny_model(seed=3))

    def fail():
        raise kind("the trainer failed")

    source.strike = fail
    with engines(folder) as pool:
        sync = make(folder, source, "nccl")
        sync.connect([replace(endpoint, is_external=external) for _, endpoint in pool])
        with pytest.raises(kind, match="the trainer failed") as caught:
            sync.update(1, "abort")
        named = f"engines at {pool[0][1].url} stay paused: restart them" in str(caught.value)
        assert named == external
        sync.close()


@pytest.mark.parametrize("at", ["/server_info", "/pause_generation", "/destroy_weights_update_group"])
def test_an_engine_that_hangs_leaves_the_others_time_for_the_update(folder, at):
    source = ModelSource(tiny_model(seed=3))
    with engines(folder, 2) as pool, hanging(pool[0][1], at) as silent:
        sync = make(folder, source, "nccl", timeout=8.0)
        sync.connect([silent, pool[1][1]])
        assert list(sync.update(1, "abort").failed) == ["engine-0"]
        check(pool, source.model, "1", failed=["engine-0"])
        sync.close()


def test_engines_that_the_deadline_leaves_between_two_versions_are_in_the_report(folder, monkeypatch):
    source, clock = StrikingSource(tiny_model(seed=3)), Clock()
    monkeypatch.setattr(client, "time", clock)
    source.strike = clock.skip
    with engines(folder, 2) as pool:
        sync = make(folder, source, "nccl", timeout=30.0)
        sync.connect([endpoint for _, endpoint in pool])
        report = sync.update(1, "abort")
        assert all("within 30 s" in reason for reason in report.failed.values())
        assert list(report.failed) == ["engine-0", "engine-1"]
        sync.close()


def test_a_trainer_that_is_late_with_its_files_loses_no_engine(folder, tmp_path, monkeypatch):
    source, clock = StrikingSource(tiny_model(seed=0)), Clock()
    monkeypatch.setattr(client, "time", clock)
    source.strike = clock.skip
    files = {"update_weight_disk_dir": str(tmp_path / "published"), "update_weight_mode": "delta"}
    with engines(folder) as pool:
        before = scores(pool[0][1].url)
        sync = make(
            folder,
            source,
            "disk",
            timeout=30.0,
            update_weight_local_checkpoint_dir=str(tmp_path / "l"),
            **files,
        )
        sync.connect([endpoint for _, endpoint in pool])
        with pytest.raises(DeadlineError, match="update-timeout"):
            sync.update(1, "abort")
        assert scores(pool[0][1].url) == before
        sync.close()

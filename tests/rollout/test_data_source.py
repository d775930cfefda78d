import json
import types

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime.errors import CheckpointError, DataError, HookError, ModelError
from slime.rollout.data_source import RolloutDataSource, RolloutDataSourceWithBuffer, pop_first
from slime.rollout.groups import flatten
from slime.rollout.sample_json import from_json, to_json
from slime.utils.types import Sample
from tests.rollout.test_hooks import HERE
from tests.tiny import tiny_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("source")
    rows = [{"input": f"q{n}", "metadata": {"n": [n]}} for n in range(5)]
    (folder / "five.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def source(folder, kind=RolloutDataSourceWithBuffer, **args):
    args = {"prompt_data": str(folder / "five.jsonl"), "save": str(folder), "load": str(folder)} | args
    return kind(types.SimpleNamespace(**args))


def prompts(groups):
    return [group[0].prompt for group in groups]


def test_more_prompts_than_the_data_set_holds_wrap_as_often_as_needed(folder):
    data = source(folder)
    assert prompts(data.get_samples(12)) == [f"q{n % 5}" for n in range(12)]
    assert (data.epoch_id, data.sample_offset, len(data)) == (2, 2, 5)


def test_every_sample_has_ids_of_its_own_and_is_a_copy(folder):
    groups = source(folder, n_samples_per_prompt=3).get_samples(2)
    rows = list(flatten(groups))
    assert [row.index for row in rows] == list(range(6))
    assert [row.rollout_id for row in rows] == list(range(6))
    assert [row.group_index for row in rows] == [0, 0, 0, 1, 1, 1]
    rows[0].metadata["n"].append("changed")
    assert rows[1].metadata == {"n": [0]}


@pytest.mark.parametrize("args", [{"prompt_data": None}, {"rollout_global_dataset": False}])
def test_without_a_data_set_samples_are_blank_but_have_ids(folder, args):
    data = source(folder, n_samples_per_prompt=2, **args)
    groups = data.get_samples(2)
    assert prompts(groups) == ["", ""]
    assert [row.rollout_id for row in flatten(groups)] == [0, 1, 2, 3]
    assert len(data) == 0


def test_shuffled_epochs_differ_and_hold_every_prompt(folder):
    data = source(folder, rollout_shuffle=True, rollout_seed=1)
    first, second = prompts(data.get_samples(5)), prompts(data.get_samples(5))
    assert sorted(first) == sorted(second) == [f"q{n}" for n in range(5)]
    assert first != second
    assert first == prompts(source(folder, rollout_shuffle=True, rollout_seed=1).get_samples(5))


@given(
    before=st.integers(0, 12),
    after=st.integers(1, 12),
    requeued=st.integers(0, 3),
    shuffle=st.booleans(),
)
def test_resume_gives_exactly_what_would_have_followed(folder, before, after, requeued, shuffle):
    args = {"rollout_shuffle": shuffle, "n_samples_per_prompt": 2}
    data = source(folder, **args)
    groups = data.get_samples(before)
    for group in groups[:requeued]:
        group[0].append_response_tokens(tokens=[1], log_probs=[-0.25], text="x")
        group[1].status = Sample.Status.ABORTED
    data.add_samples(groups[:requeued])
    data.save(before)
    resumed = source(folder, **args)
    resumed.load(before)
    assert resumed.get_samples(after) == data.get_samples(after)


def test_newest_state_is_found_and_a_negative_id_starts_afresh(folder, tmp_path):
    data = source(folder, save=str(tmp_path))
    for rollout_id in (2, 10):
        data.get_samples(1)
        data.save(rollout_id)
    resumed = source(folder, load=str(tmp_path))
    resumed.load()
    assert prompts(resumed.get_samples(1)) == ["q2"]
    fresh = source(folder, load=str(tmp_path))
    fresh.load(-1)
    assert prompts(fresh.get_samples(1)) == ["q0"]
    source(folder, load=None).load(3)
    source(folder, load=str(tmp_path / "empty")).load()


def test_state_is_json(folder, tmp_path):
    source(folder, save=str(tmp_path)).save(0)
    (path,) = (tmp_path / "rollout").iterdir()
    assert json.loads(path.read_text())["sample_index"] == 0


def test_state_of_another_data_set_is_refused(folder, tmp_path):
    source(folder, save=str(tmp_path)).save(0)
    other = source(folder, load=str(tmp_path), prompt_data=f"{folder}/five.jsonl@[:3]")
    with pytest.raises(CheckpointError, match="same --prompt-data"):
        other.load(0)


def test_missing_or_damaged_state_names_file_and_remedy(folder, tmp_path):
    data = source(folder, load=str(tmp_path))
    with pytest.raises(CheckpointError, match=r"data_source_7\.json.*\n.*--start-rollout-id 0"):
        data.load(7)
    (tmp_path / "rollout").mkdir()
    (tmp_path / "rollout" / "data_source_7.json").write_text("{")
    with pytest.raises(CheckpointError, match="damaged"):
        data.load(7)


def test_state_that_cannot_be_written_is_an_error(folder, tmp_path):
    with pytest.raises(CheckpointError, match="--save"):
        source(folder, save=None).save(0)
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be written"):
        source(folder, save=str(tmp_path / "file")).save(0)


def test_buffered_groups_come_first_and_are_given_once(folder):
    data = source(folder)
    first = data.get_samples(2)
    data.add_samples(first)
    groups = data.get_samples(3)
    assert [group[0].index for group in groups] == [0, 1, 2]
    assert data.buffer == []


def test_fan_out_groups_are_counted_by_rollout(folder):
    data = source(folder, n_samples_per_prompt=2)
    (group,) = data.get_samples(1)
    sibling = Sample(rollout_id=group[0].rollout_id)
    data.add_samples([[[group[0], sibling], [group[1]]]])
    data.add_samples([[group[0], sibling, group[1]]])
    data.save(50)
    resumed = source(folder, n_samples_per_prompt=2)
    resumed.load(50)
    assert resumed.buffer == data.buffer


@pytest.mark.parametrize("wrong", [lambda group: group[:1], lambda group: [], lambda group: group[0]])
def test_group_of_wrong_size_is_refused_and_nothing_added(folder, wrong):
    data = source(folder, n_samples_per_prompt=2)
    good, other = data.get_samples(2)
    with pytest.raises(DataError, match="groups have 2"):
        data.add_samples([good, wrong(other)])
    assert data.buffer == []


def test_source_without_buffer_says_so(folder):
    with pytest.raises(DataError, match="RolloutDataSourceWithBuffer"):
        source(folder, RolloutDataSource).add_samples([[Sample()]])


def test_buffer_filter_chooses_and_is_checked(folder):
    data = source(folder, buffer_filter_path=HERE + "take_last")
    data.add_samples(data.get_samples(3))
    assert [group[0].index for group in data.get_samples(1)] == [2]
    data = source(folder, buffer_filter_path=HERE + "take_too_many")
    data.add_samples(data.get_samples(1))
    with pytest.raises(HookError, match=r"--buffer-filter-path .*: returned 2 groups"):
        data.get_samples(1)


def test_pop_first_removes_what_it_gives():
    buffer = [1, 2, 3]
    assert pop_first(None, None, buffer, 2) == [1, 2]
    assert buffer == [3]


def test_prompt_limits_need_the_tokenizer_and_use_the_smaller(folder, tmp_path):
    tiny_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "long.jsonl").write_text('{"input": "abc"}\n{"input": "abcd"}\n')
    args = {"prompt_data": str(tmp_path / "long.jsonl"), "rollout_max_context_len": 4}
    data = source(folder, hf_checkpoint=str(tmp_path), rollout_max_prompt_len=9, **args)
    assert prompts(data.get_samples(2)) == ["abc", "abc"]
    with pytest.raises(ModelError, match="--hf-checkpoint"):
        source(folder, **args)


def test_arrays_on_samples_survive_json():
    sample = Sample(index=1, rollout_routed_experts=np.arange(12, dtype=np.int32).reshape(2, 3, 2))
    back = from_json(json.loads(json.dumps(to_json(sample))))
    assert back.rollout_routed_experts.dtype == np.int32
    assert np.array_equal(back.rollout_routed_experts, sample.rollout_routed_experts)


@pytest.mark.parametrize("value", [object(), {1: "x"}, b"bytes"])
def test_value_that_json_cannot_hold_names_sample_and_field(value):
    with pytest.raises(CheckpointError, match=r"sample 4: metadata\.key holds"):
        to_json(Sample(index=4, metadata={"key": value}))

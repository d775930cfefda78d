import json
import logging
from collections import Counter
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime.errors import CheckpointError
from slime.rollout.data_source import RolloutDataSourceWithBuffer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sets")
    for name, count in (("a", 3), ("b", 5), ("c", 2)):
        rows = "".join(json.dumps({"input": f"{name}{n}"}) + "\n" for n in range(count))
        (folder / f"{name}.jsonl").write_text(rows)
    return folder


def source(folder, files=("a", "b"), **args):
    paths = [str(folder / f"{file}.jsonl") for file in files]
    args = {"prompt_data": paths, "save": str(folder), "load": str(folder)} | args
    return RolloutDataSourceWithBuffer(SimpleNamespace(**args))


def prompts(groups):
    return [group[0].prompt for group in groups]


def test_several_files_are_mixed_by_weight_and_named(folder):
    data = source(folder, prompt_data_weights=[0.7, 0.3])
    groups = data.get_samples(100)
    assert Counter(group[0].metadata["slime_dataset"] for group in groups) == {"a": 70, "b": 30}
    assert len(data) == 8


def test_without_weights_an_epoch_holds_every_prompt_once(folder):
    data = source(folder, ("a", "b", "c"))
    for _ in range(3):
        assert sorted(prompts(data.get_samples(10))) == sorted(data.dataset[n].prompt for n in range(10))


def test_each_set_has_epochs_of_its_own(folder):
    data = source(folder, prompt_data_weights=[3, 1])
    given_out = prompts(data.get_samples(20))
    assert [p for p in given_out if p[0] == "a"] == [f"a{n % 3}" for n in range(15)]
    assert [p for p in given_out if p[0] == "b"] == [f"b{n % 5}" for n in range(5)]
    assert [stream.given for stream in data.prompts.streams] == [15, 5]


def test_slices_keep_working_and_a_file_that_repeats_is_named_by_its_path(folder):
    paths = [f"{folder}/b.jsonl@[:2]", f"{folder}/b.jsonl@[-2:]"]
    data = source(folder, prompt_data=paths)
    groups = data.get_samples(4)
    assert sorted(prompts(groups)) == ["b0", "b1", "b3", "b4"]
    assert {group[0].metadata["slime_dataset"] for group in groups} == set(paths)


def test_one_file_leaves_no_mark_on_its_samples(folder):
    (group,) = source(folder, ("a",)).get_samples(1)
    assert group[0].metadata == {}


@given(
    before=st.integers(0, 25),
    after=st.integers(1, 25),
    shuffle=st.booleans(),
    weights=st.lists(st.integers(1, 9), min_size=3, max_size=3),
)
def test_a_mixture_resumes_exactly(folder, before, after, shuffle, weights):
    args = {"rollout_shuffle": shuffle, "prompt_data_weights": weights, "n_samples_per_prompt": 2}
    data = source(folder, ("a", "b", "c"), **args)
    data.get_samples(before)
    data.save(before)
    resumed = source(folder, ("a", "b", "c"), **args)
    resumed.load(before)
    assert resumed.get_samples(after) == data.get_samples(after)


def test_with_changed_weights_the_sets_go_on_and_the_new_shares_hold(folder, caplog):
    data = source(folder, prompt_data_weights=[9, 1])
    data.get_samples(10)
    data.save(77)
    resumed = source(folder, prompt_data_weights=[1, 1])
    with caplog.at_level(logging.WARNING):
        resumed.load(77)
    assert "--prompt-data-weights were [9, 1] and are [1, 1] now" in caplog.text
    following = prompts(resumed.get_samples(10))
    assert [p for p in following if p[0] == "b"] == ["b1", "b2", "b3", "b4", "b0"]
    assert [p for p in following if p[0] == "a"] == ["a0", "a1", "a2", "a0", "a1"]


def test_other_files_are_refused_with_both_named(folder):
    source(folder).save(78)
    with pytest.raises(CheckpointError, match=r"'b'.*this run has.*'c'"):
        source(folder, ("a", "c")).load(78)
    with pytest.raises(CheckpointError, match="this run has none"):
        source(folder, prompt_data=None).load(78)

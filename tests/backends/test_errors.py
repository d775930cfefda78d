"""What cannot be trained on is an error that names the hook, the sample and the lengths."""

import asyncio
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest

from slime.backends.update import train_on_rollouts
from slime.config.training_sections import AlgorithmConfig
from slime.errors import DataError, HookError, RewardError, RolloutFailedError
from slime.rollout.convert import to_train_samples
from slime.rollout.rm_hub import async_rm
from slime.utils.types import Sample
from tests.backends.hooks import hooks
from tests.backends.rollouts import group_samples
from tests.backends.test_update import Recorder
from tests.rollout.kit import ListSource, finished, scripted
from tests.rollout.test_sglang_rollout import HOOKS, step


def train(samples, found=None, **algorithm):
    recorder = Recorder()
    train_on_rollouts(
        recorder,
        samples,
        algorithm=AlgorithmConfig(**algorithm),
        rollouts_per_step=100,
        **({} if found is None else {"hooks": found}),
    )
    return recorder


def sample(index=3, **fields):
    return finished(Sample(index=index, group_index=0, rollout_id=index), **fields)


async def nan_reward(args, sample, **kwargs):
    return math.nan


def test_a_reward_that_is_nan_names_hook_rollout_and_sample():
    args = SimpleNamespace(custom_rm_path=f"{__name__}.nan_reward")
    for read in (
        lambda: asyncio.run(async_rm(args, sample())),
        lambda: to_train_samples([[sample(reward=math.nan)]], args),
    ):
        with pytest.raises(RewardError, match="nan_reward returned nan, which is not a finite") as caught:
            read()
        assert "sample 3 (rollout 3)" in str(caught.value)
    with pytest.raises(RewardError, match="rollout 0, sample 0: the reward nan"):
        train([replace(group_samples()[0], reward=math.nan)])


def test_an_empty_mask_names_hook_sample_and_lengths():
    with pytest.raises(HookError, match="sample 3: loss_mask has length 0, response_length is 2") as caught:
        to_train_samples([[sample(loss_mask=[])]], SimpleNamespace())
    assert str(caught.value).startswith("rollout function: ")


def test_a_batch_whose_masks_are_all_zero_names_samples_and_lengths():
    silent = [replace(s, loss_mask=(0,) * s.response_length) for s in group_samples()]
    for algorithm in ({}, {"loss_type": "sft_loss"}):
        with pytest.raises(DataError, match="loss masks of all 6 samples are 0") as caught:
            train(silent, **algorithm)
        length = silent[0].response_length
        assert f"sample 0 of rollout 0 has {length} response tokens" in str(caught.value)
    assert len(train([*silent[:1], *group_samples()[1:]]).steps[0]) == 6


def test_a_batch_that_was_filtered_empty_names_the_filter_and_counts_by_reason():
    with scripted() as server, pytest.raises(RolloutFailedError, match="gave only 0 of 1 groups") as caught:
        step(
            server,
            ListSource(),
            rollout_batch_size=1,
            dynamic_sampling_filter_path=HOOKS + "drop_every_group",
        )
    assert "groups dropped: dull 64" in str(caught.value)
    assert "--dynamic-sampling-filter-path" in str(caught.value)
    removed = [replace(s, votes=False) for s in group_samples()]
    with pytest.raises(RolloutFailedError, match="all 6 samples of 6 rollouts failed or were removed"):
        train(removed)


@pytest.mark.parametrize("estimator", ["grpo", "gspo", "cispo", "rloo", "reinforce_plus_plus_baseline"])
def test_groups_of_one_are_named_where_they_teach_nothing(estimator):
    alone = [replace(s, group_index=10 + s.index) for s in group_samples()]
    with pytest.raises(DataError, match="each of the 6 groups has one rollout") as caught:
        train(alone, advantage_estimator=estimator)
    assert "group 10 has rollout 0, group 11 has rollout 1" in str(caught.value)
    assert "group_index" in str(caught.value)


def test_groups_of_one_are_no_error_where_something_else_teaches():
    alone = [replace(s, group_index=10 + s.index) for s in group_samples()]
    assert train(alone, entropy_coef=0.1).steps
    assert train(alone, rewards_normalization=False).steps
    assert train(alone, advantage_estimator="reinforce_plus_plus").steps
    assert train([replace(s, reward=1.0) for s in group_samples()]).steps
    together = [replace(s, group_index=0) if s.index < 2 else s for s in alone]
    assert train(together).steps


def wrong_shape(args, rollout_data):
    rollout_data["advantages"] = [log_probs[1:] for log_probs in rollout_data["log_probs"]]


def test_advantages_of_a_wrong_shape_name_hook_sample_and_lengths():
    length = group_samples()[0].response_length
    with pytest.raises(HookError, match=f"has shape .{length - 1},., expected .{length},.") as caught:
        train(group_samples(), hooks(advantages=wrong_shape))
    assert "--custom-advantage-function-path" in str(caught.value)
    assert "sample 0 of rollout 0" in str(caught.value)


@pytest.mark.parametrize("field", ["loss_mask", "rollout_log_probs", "teacher_log_probs"])
def test_lists_of_a_wrong_length_name_hook_sample_and_both_lengths(field):
    with pytest.raises(HookError, match=f"sample 3: {field} has length 1, response_length is 2"):
        to_train_samples([[sample(**{field: [0]})]], SimpleNamespace())


def test_a_row_of_a_wrong_length_names_rollout_and_sample():
    samples = group_samples()
    samples[2] = replace(samples[2], loss_mask=(1, 1))
    with pytest.raises(DataError, match=r"rollout 2, sample 2: loss_mask has length 2, the response has \d"):
        train(samples)

import math
from types import SimpleNamespace

import pytest

from slime.errors import DataError, HookError, RewardError
from slime.rollout.convert import policy_version, to_train_samples
from slime.utils.types import Sample
from tests.rollout.kit import finished

ARGS = SimpleNamespace()


def sample(index=0, group=0, **fields):
    return finished(Sample(index=index, group_index=group, rollout_id=index), **fields)


def test_a_row_carries_what_the_sample_carries():
    (row,) = to_train_samples([[sample(4, 1, weight_versions=["3", "4"])]], ARGS)
    assert (row.rollout_id, row.group_index, row.policy_version) == (4, 1, 3)
    assert row.tokens == (7, 8, 9)
    assert row.loss_mask == (1, 1)
    assert row.rollout_log_probs == (-0.5, -0.25)
    assert row.votes


def test_law_2_siblings_share_the_rollout_and_rows_have_unique_indices():
    rows = to_train_samples([[[sample(0), sample(0)], [sample(1)]], [sample(2, 1)]], ARGS)
    assert [row.index for row in rows] == [0, 1, 2, 3]
    assert [row.rollout_id for row in rows] == [0, 0, 1, 2]


def test_law_2_unset_ids_are_filled_without_touching_those_that_are_set():
    bare = [Sample(), Sample()]
    for one in bare:
        finished(one)
    rows = to_train_samples([[sample(0, 0)], bare, [[finished(Sample()), finished(Sample())]]], ARGS)
    assert [row.rollout_id for row in rows] == [0, 1, 2, 3, 3]
    assert [row.group_index for row in rows] == [0, 1, 1, 2, 2]


def test_one_rollout_id_in_two_groups_is_an_error():
    with pytest.raises(DataError, match="rollout_id 0 is in group 0 and in group 1"):
        to_train_samples([[sample(0, 0)], [sample(0, 1)]], ARGS)


@pytest.mark.parametrize(
    "fields",
    [{"status": Sample.Status.FAILED}, {"status": Sample.Status.ABORTED}, {"remove_sample": True}],
)
def test_law_4_what_must_not_train_does_not_vote_and_has_no_number_for_a_reward(fields):
    (row,) = to_train_samples([[sample(reward=None, **fields)]], ARGS)
    assert not row.votes
    assert math.isnan(row.reward)
    assert row.trained_tokens == 0


def test_a_failed_sample_without_tokens_is_still_a_row():
    (row,) = to_train_samples(
        [[Sample(index=0, group_index=0, rollout_id=0, status=Sample.Status.FAILED)]], ARGS
    )
    assert len(row.tokens) == 2
    assert row.response_length == len(row.loss_mask) == 1


def test_a_reward_that_is_missing_is_an_error():
    with pytest.raises(RewardError, match=r"sample 0 .*None"):
        to_train_samples([[sample(reward=None)]], ARGS)


def test_reward_dicts_are_read_by_key():
    args = SimpleNamespace(reward_key="score")
    (row,) = to_train_samples([[sample(reward={"score": 0.5})]], args)
    assert row.reward == 0.5


def test_a_reward_that_training_cannot_read_is_an_error():
    args = SimpleNamespace(reward_key="acc", eval_reward_key="score")
    with pytest.raises(RewardError, match=r"keys \['score'\], training reads the key 'acc' \(--reward-key\)"):
        to_train_samples([[sample(reward={"score": 0.5})]], args)
    with pytest.raises(RewardError, match="the reward is 0.5, training reads the key 'acc'"):
        to_train_samples([[sample(reward=0.5)]], args)


def test_ids_that_no_model_has_train_nothing():
    with pytest.raises(HookError, match="tokens holds -1"):
        to_train_samples([[sample(tokens=[7, 8, -1])]], ARGS)
    failed = sample(tokens=[-1, 8, 9], status=Sample.Status.FAILED)
    assert to_train_samples([[failed]], ARGS)[0].tokens == (0, 0)


def test_lengths_are_checked():
    with pytest.raises(HookError, match="loss_mask has length 1, response_length is 2"):
        to_train_samples([[sample(loss_mask=[1])]], ARGS)


def test_log_probs_may_be_missing_but_not_broken():
    (row,) = to_train_samples([[sample(rollout_log_probs=None, loss_mask=None)]], ARGS)
    assert row.rollout_log_probs is None
    assert row.loss_mask == (1, 1)
    with pytest.raises(HookError, match="is nan at response token 0"):
        to_train_samples([[sample(rollout_log_probs=[math.nan, 0.0])]], ARGS)


def test_versions_are_numbers_or_the_engines_first():
    assert policy_version(Sample(weight_versions=["default", "1"])) == 0
    assert policy_version(Sample(weight_versions=["12"])) == 12
    assert policy_version(Sample()) == 0
    with pytest.raises(DataError, match="'v2' is not a number"):
        policy_version(Sample(weight_versions=["v2"]))

import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime.errors import DataError, RewardError
from slime.train.normalise import group_advantages
from tests.train.rows import row

rewards_st = st.lists(st.floats(-5, 5), min_size=2, max_size=9)


@given(rewards_st)
def test_advantage_is_the_standard_score_of_the_group(rewards):
    found = group_advantages([row(i, r) for i, r in enumerate(rewards)]).by_index
    std = np.std(rewards, ddof=1)
    if len(set(rewards)) > 1 and std > 1e-3:
        expected = (np.array(rewards) - np.mean(rewards)) / (std + 1e-6)
        assert np.allclose([found[i] for i in range(len(rewards))], expected, atol=1e-9)


@pytest.mark.parametrize(("count", "reward"), [(8, 0.3), (12, 0.7), (3, 0.1), (7, 1e-17)])
def test_equal_rewards_give_exactly_zero(count, reward):
    found = group_advantages([row(i, reward) for i in range(count)])
    assert set(found.by_index.values()) == {0.0}
    assert found.zero_std_groups == {reward: 1}


@given(st.lists(st.tuples(st.floats(-2, 2), st.integers(1, 4)), min_size=2, max_size=6), st.integers(0, 99))
def test_law_3_a_rollout_votes_once_however_it_is_cut(rollouts, seed):
    whole = group_advantages([row(i, r) for i, (r, _) in enumerate(rollouts)]).by_index
    pieces = [row(10 * i + k, r, rollout=i) for i, (r, cuts) in enumerate(rollouts) for k in range(cuts)]
    random.Random(seed).shuffle(pieces)
    cut = group_advantages(pieces).by_index
    assert all(cut[piece.index] == whole[piece.rollout_id] for piece in pieces)


def test_law_2_groups_are_found_by_id_in_any_order_and_size():
    samples = [row(0, 1.0, group=5), row(1, 3.0, group=9), row(2, 0.0, group=5), row(3, 3.0, group=9)]
    samples.append(row(4, 0.0, group=9))
    found = group_advantages(samples, scale_by_std=False).by_index
    assert found == pytest.approx({0: 0.5, 2: -0.5, 1: 1.0, 3: 1.0, 4: -2.0})


def test_law_4_rows_without_vote_change_nothing():
    samples = [row(0, 1.0), row(1, 0.0)]
    failed = [row(2, math.nan, votes=False), row(3, 50.0, votes=False)]
    found = group_advantages(samples + failed)
    assert found.by_index == group_advantages(samples).by_index
    assert set(found.rollout_rewards) == {0, 1}


def test_siblings_with_different_rewards_vote_with_their_token_weighted_mean():
    samples = [row(0, 1.0, rollout=0, mask=(1, 1, 1)), row(1, 0.0, rollout=0, mask=(1,)), row(2, 0.25)]
    found = group_advantages(samples, scale_by_std=False)
    assert found.rollout_rewards[0] == 0.75
    assert found.by_index == pytest.approx({0: 0.5, 1: -0.5, 2: -0.25})


def test_a_group_of_one_and_equal_votes_are_not_scaled():
    assert group_advantages([row(0, 3.0)]).by_index == {0: 0.0}
    siblings = [row(0, 1.0, rollout=0, mask=(1,)), row(1, 0.0, rollout=0, mask=(1,)), row(2, 0.5)]
    assert group_advantages(siblings).by_index == {0: 0.5, 1: -0.5, 2: 0.0}


def test_raw_rewards_without_normalisation():
    assert group_advantages([row(0, 3.0), row(1, 1.0)], normalise=False).by_index == {0: 3.0, 1: 1.0}


@pytest.mark.parametrize("reward", [None, math.nan, math.inf, "1"])
def test_law_4_a_missing_reward_names_the_rollout(reward):
    with pytest.raises(RewardError, match="rollout 7"):
        group_advantages([row(3, reward, rollout=7), row(4)])


def test_ids_that_contradict_each_other_are_refused():
    with pytest.raises(DataError, match="sample 1"):
        group_advantages([row(1), row(1)])
    with pytest.raises(DataError, match="rollout 0"):
        group_advantages([row(1, rollout=0, group=1), row(2, rollout=0, group=2)])

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime.errors import RewardError
from slime.train.rewards import (
    TokenRewards,
    TurnRewards,
    read_reward,
    sum_sibling_rewards,
    token_rewards,
    total_reward,
    turn_ends,
)
from tests.train.rows import row


def test_hooks_say_one_number_or_a_list_by_name():
    assert read_reward(1, place="here") == read_reward(np.float32(1), place="here") == 1.0
    assert read_reward({"turns": [1, 0.5]}, place="here") == TurnRewards((1.0, 0.5))
    assert read_reward({"tokens": [0.0]}, place="here") == TokenRewards((0.0,))
    assert read_reward([0.0, 1], place="here") == TokenRewards((0.0, 1.0))
    assert total_reward(TurnRewards((0.5, 1.0))) == total_reward(1.5) == 1.5


@pytest.mark.parametrize(
    "value", [None, math.nan, "1", [math.nan], {"turns": "12"}, {"turns": [math.inf]}, {"score": [1.0]}, {}]
)
def test_other_forms_are_refused_by_place(value):
    with pytest.raises(RewardError, match="rollout 3: the reward"):
        read_reward(value, place="rollout 3")


def test_turns_end_where_a_run_of_trained_tokens_does():
    assert turn_ends((1, 1, 0, 1, 0, 0, 1)) == [1, 3, 6]
    assert turn_ends((0, 0)) == turn_ends(()) == []


def test_one_number_is_paid_once_at_the_last_trained_token():
    siblings = [row(0, 0.3, mask=(1, 1)), row(1, 0.3, mask=(1, 1, 0)), row(2, 0.3, mask=(0,))]
    assert token_rewards(siblings) == [[0.0, 0.0], [0.0, 0.3, 0.0], [0.0]]


@given(st.lists(st.tuples(st.floats(-3, 3), st.integers(0, 3)), min_size=1, max_size=5))
def test_every_trained_token_sees_the_number_of_its_own_row(found):
    siblings = [row(i, reward, mask=(1,) * size + (0,)) for i, (reward, size) in enumerate(found)]
    placed = [reward for sample in token_rewards(siblings) for reward in sample]
    seen = list(itertools.accumulate(reversed(placed)))[::-1]
    expected = [(reward, mask) for reward, size in found for mask in [1] * size + [0]]
    for value, (reward, mask) in zip(seen, expected, strict=True):
        assert not mask or value == pytest.approx(reward, abs=1e-12)


def test_listed_rewards_stay_where_they_are():
    siblings = [
        row(0, TurnRewards((1.0, 2.0)), mask=(1, 0, 1, 1)),
        row(1, TokenRewards((0.5, 0.0)), mask=(1, 0)),
    ]
    assert token_rewards(siblings) == [[1.0, 0.0, 0.0, 2.0], [0.5, 0.0]]


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (TurnRewards((1.0,)), r"rollout 4, sample 4: 1 rewards, one a turn, for 2 turns .* of 4 tokens"),
        (TokenRewards((1.0,)), r"rollout 4, sample 4: 1 rewards, one a token, for 4 tokens"),
        (TurnRewards((1.0, math.nan)), r"rollout 4, sample 4: its rewards of 2 turns"),
        (TokenRewards((0.0, 1.0, 0.0, 0.0)), r"rollout 4, sample 4: reward on response token 1 of 4"),
        (None, r"rollout 4, sample 4: the reward None"),
    ],
)
def test_rewards_that_do_not_fit_their_row_are_refused(reward, message):
    with pytest.raises(RewardError, match=message):
        token_rewards([row(4, reward, mask=(1, 0, 1, 1))])


def test_a_rollout_has_one_form_of_reward():
    with pytest.raises(RewardError, match=r"rollout 0, sample 1: its reward is one number, that of sample 0"):
        token_rewards([row(0, TurnRewards((1.0,)), rollout=0), row(1, 1.0, rollout=0)])


@given(st.sampled_from([0.3, 0.7, 1.0, -2.5, 0.0]), st.lists(st.integers(1, 12), min_size=1, max_size=5))
def test_shares_of_a_reward_sum_to_it_exactly_in_any_number_of_parts(reward, parts):
    shares = [
        row(100 * rollout + k, reward / count, rollout=rollout)
        for rollout, count in enumerate(parts)
        for k in range(count)
    ]
    assert {sample.reward for sample in sum_sibling_rewards(shares[::-1])} == {reward}


def test_removed_siblings_hold_their_share_and_failed_ones_none():
    samples = [
        row(0, 0.5, rollout=0),
        row(1, 0.5, rollout=0, votes=False),
        row(2, math.nan, rollout=1, votes=False),
        row(3, TurnRewards((1.0,)), rollout=2),
    ]
    found = sum_sibling_rewards(samples)
    assert [sample.reward for sample in found[:2]] == [1.0, 0.5]
    assert found[2:] == samples[2:]
    with pytest.raises(RewardError, match="rollout 5, sample 5"):
        sum_sibling_rewards([row(5, math.nan)])

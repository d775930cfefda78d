import math
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.errors import DataError, RewardError
from slime.train.advantages import Estimator, EstimatorName, TokenInputs, estimator_name, token_advantages
from slime.train.rewards import TokenRewards, TurnRewards
from tests.train.rollouts import cut, joined, rollouts, whole
from tests.train.rows import row

NAMES = get_args(EstimatorName)
quick = settings(max_examples=25, deadline=None)
FULL = {"kl_coef": 0.1, "distillation_coef": 0.3, "gamma": 0.9, "lambd": 0.8}


def inputs(fields):
    return TokenInputs(
        log_probs=fields["old_log_probs"],
        ref_log_probs=fields["ref_log_probs"],
        values=fields["values"],
        teacher_log_probs=fields["teacher_log_probs"],
    )


def lists(found):
    return {index: values.tolist() for index, values in found.advantages.items()}


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data(), listed=st.booleans(), seed=st.integers(0, 999))
@quick
def test_laws_2_and_3_neither_cuts_nor_order_change_an_advantage(name, data, listed, seed):
    batch = data.draw(rollouts(listed=listed))
    estimator = Estimator(name=name, whiten=seed % 2 == 0, **FULL)
    rows, fields = whole(batch)
    pieces, piece_fields = cut(batch, seed)
    one = token_advantages(rows, estimator, inputs(fields))
    other = token_advantages(pieces, estimator, inputs(piece_fields))
    assert joined(rows, one.advantages) == joined(pieces, other.advantages)
    assert one.rollout_rewards == other.rollout_rewards
    assert one.metrics == other.metrics
    if one.returns is not None:
        assert joined(rows, one.returns) == joined(pieces, other.returns)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "ppo"])
@pytest.mark.parametrize(("count", "reward"), [(8, 0.3), (12, 0.7)])
@pytest.mark.parametrize("whiten", [False, True])
def test_a_group_of_equal_rewards_gives_exactly_zero(name, count, reward, whiten):
    found = token_advantages([row(i, reward) for i in range(count)], Estimator(name=name, whiten=whiten))
    assert {value for values in lists(found).values() for value in values} == {0.0}
    assert found.zero_std_groups == {reward: 1}


@pytest.mark.parametrize("name", NAMES)
@given(rollouts(), st.integers(0, 999))
@quick
def test_law_4_rows_without_vote_change_nothing(name, batch, seed):
    rows, fields = cut(batch, seed)
    failed = [
        row(9000, math.nan, votes=False),
        row(9001, 7.0, votes=False, group=1),
        row(9002, None, votes=False),
    ]
    estimator = Estimator(name=name, **FULL)
    found = token_advantages([*failed, *rows], estimator, inputs(fields))
    assert lists(found) == lists(token_advantages(rows, estimator, inputs(fields)))


def test_rloo_is_the_difference_to_the_mean_of_the_others_in_uneven_groups():
    rewards = {0: [1.0, 0.0, 0.5], 1: [2.0, 5.0], 2: [3.0]}
    samples = [row(10 * g + i, r, group=g) for g, group in rewards.items() for i, r in enumerate(group)]
    found = lists(token_advantages(samples[::-1], Estimator(name="rloo")))
    for group, values in rewards.items():
        for i, reward in enumerate(values):
            others = [*values[:i], *values[i + 1 :]]
            expected = reward - np.mean(others) if others else 0.0
            assert found[10 * group + i] == pytest.approx([expected, expected])


def test_rloo_counts_a_rollout_once_and_keeps_credit_per_segment():
    samples = [row(0, 1.0, rollout=0, mask=(1, 1, 1)), row(1, 0.0, rollout=0, mask=(1,)), row(2, 0.25)]
    found = lists(token_advantages(samples, Estimator(name="rloo")))
    assert found == {0: [0.75] * 3, 1: [-0.25], 2: [-0.5, -0.5]}


def published_gae(rewards, values, gamma, lambd):
    """TRL's and verl's loop, on one sequence."""
    last, advantages = 0.0, []
    for t in reversed(range(len(rewards))):
        following = values[t + 1] if t + 1 < len(values) else 0.0
        delta = rewards[t] + gamma * following - values[t]
        last = delta + gamma * lambd * last
        advantages.insert(0, last)
    return advantages


def trained(each, values):
    return [v for v, m in zip(values, each.mask, strict=True) if m]


@given(rollouts(), st.sampled_from([(1.0, 1.0), (0.99, 0.95)]))
@quick
def test_ppo_is_published_gae_with_tool_tokens_left_out(batch, decay):
    gamma, lambd = decay
    rows, fields = whole(batch)
    estimator = Estimator(name="ppo", gamma=gamma, lambd=lambd, kl_coef=0.2)
    found = token_advantages(rows, estimator, inputs(fields))
    for each in batch:
        at = 100 * each.rollout
        log_ratio = np.subtract(each.fields["old_log_probs"], each.fields["ref_log_probs"])
        rewards = [-0.2 * kl for kl in trained(each, log_ratio)]
        rewards[-1] += each.reward
        values = trained(each, each.fields["values"])
        expected = published_gae(rewards, values, gamma, lambd)
        assert trained(each, found.advantages[at].tolist()) == pytest.approx(expected, abs=1e-6)
        assert trained(each, found.returns[at].tolist()) == pytest.approx(np.add(expected, values), abs=1e-6)
        assert all(a == 0.0 for a, m in zip(found.advantages[at].tolist(), each.mask, strict=True) if not m)


@given(rollouts())
@quick
def test_reinforce_plus_plus_is_verls_formula(batch):
    rows, fields = whole(batch)
    found = token_advantages(rows, Estimator(name="reinforce_plus_plus", gamma=0.9), inputs(fields))
    returns = []
    for each in batch:
        running = 0.0
        rewards = [*[0.0] * (sum(each.mask) - 1), each.reward]
        backward = []
        for reward in reversed(rewards):
            running = reward + 0.9 * running
            backward.append(running)
        returns += backward[::-1]
    expected = np.zeros(len(returns))
    if np.ptp(returns) > 1e-12:
        expected = (returns - np.mean(returns)) / np.sqrt(np.var(returns, ddof=1) + 1e-8)
    ours = [a for each in batch for a in trained(each, found.advantages[100 * each.rollout].tolist())]
    assert ours == pytest.approx(expected, abs=1e-6)


@given(rollouts())
@quick
def test_reinforce_plus_plus_baseline_is_verls_formula(batch):
    rows, fields = whole(batch)
    estimator = Estimator(name="reinforce_plus_plus_baseline", kl_coef=0.1, kl_type="k2")
    found = token_advantages(rows, estimator, inputs(fields))
    raw = []
    for each in batch:
        mean = np.mean([other.reward for other in batch if other.group == each.group])
        difference = np.subtract(each.fields["old_log_probs"], each.fields["ref_log_probs"])
        raw += [each.reward - mean - 0.1 * d**2 / 2 for d in trained(each, difference)]
    expected = np.zeros(len(raw))
    if np.ptp(raw) > 1e-9:
        expected = (raw - np.mean(raw)) / np.sqrt(np.var(raw, ddof=1) + 1e-8)
    ours = [a for each in batch for a in trained(each, found.advantages[100 * each.rollout].tolist())]
    assert ours == pytest.approx(expected, rel=1e-4, abs=1e-4)


def test_distillation_moves_each_token_toward_the_teacher():
    samples = [row(0, 1.0, mask=(1, 0, 1)), row(1, 0.0, mask=(1,))]
    given_inputs = TokenInputs(
        log_probs={0: [-1.0, 0.0, -2.0], 1: [-1.0]}, teacher_log_probs={0: [-2.0, 9.0, -1.0], 1: [-1.0]}
    )
    estimator = Estimator(scale_by_std=False, distillation_coef=0.5)
    found = token_advantages(samples, estimator, given_inputs)
    assert lists(found) == {0: [0.5 - 0.5, 0.0, 0.5 + 0.5], 1: [-0.5]}
    assert found.metrics["opd_reverse_kl"] == 0.0


def test_turn_rewards_reach_back_to_the_tokens_that_earned_them():
    mask = (1, 1, 0, 1, 0, 1)
    samples = [
        row(0, TurnRewards((1.0, 0.0, 2.0)), mask=mask),
        row(1, TurnRewards((0.0, 0.0, 0.0)), mask=mask),
    ]
    found = token_advantages(samples, Estimator(scale_by_std=False))
    votes = {0: (3 + 3 + 2 + 2) / 4, 1: 0.0}
    assert found.rollout_rewards == votes
    mean = sum(votes.values()) / 2
    assert lists(found)[0] == [3 - mean, 3 - mean, 0.0, 2 - mean, 0.0, 2 - mean]
    assert lists(found)[1] == [-mean, -mean, 0.0, -mean, 0.0, -mean]


def test_listed_rewards_are_scaled_by_the_deviation_of_the_votes():
    samples = [row(0, TokenRewards((1.0, 2.0))), row(1, TurnRewards((0.5,))), row(2, 4.0)]
    seen, votes = {0: [3.0, 2.0], 1: [0.5, 0.5], 2: [4.0, 4.0]}, [2.5, 0.5, 4.0]
    scale = np.std(votes, ddof=1) + 1e-6
    found = lists(token_advantages(samples, Estimator(name="grpo")))
    leave_one_out = lists(token_advantages(samples, Estimator(name="rloo")))
    for index, values in seen.items():
        assert found[index] == pytest.approx([(v - np.mean(votes)) / scale for v in values])
        others = [vote for i, vote in enumerate(votes) if i != index]
        assert leave_one_out[index] == pytest.approx([v - np.mean(others) for v in values])


@pytest.mark.parametrize("name", ["grpo", "rloo", "reinforce_plus_plus_baseline"])
def test_equal_listed_rewards_at_the_end_give_exactly_zero(name):
    samples = [row(i, TokenRewards((0.0,) * i + (0.7,)), mask=(1,) * (i + 1)) for i in range(12)]
    found = lists(token_advantages(samples, Estimator(name=name)))
    assert {value for values in found.values() for value in values} == {0.0}


@pytest.mark.parametrize("name", NAMES)
def test_one_reward_at_the_end_is_the_same_in_every_form(name):
    mask, values = (1, 0, 1, 1), {0: [0.1] * 4, 1: [0.4] * 4}
    forms = [
        lambda r: r,
        lambda r: TurnRewards((0.0, r)),
        lambda r: TokenRewards((0.0, 0.0, 0.0, r)),
    ]
    found = [
        lists(
            token_advantages(
                [row(0, form(0.7), mask=mask), row(1, form(0.2), mask=mask)],
                Estimator(name=name, lambd=0.9),
                TokenInputs(values=values),
            )
        )
        for form in forms
    ]
    assert found[0] == found[1] == found[2]


def test_returns_of_siblings_with_rewards_of_their_own_are_those_rewards():
    samples = [row(1, 0.2, rollout=0, mask=(1, 0)), row(0, 1.0, rollout=0), row(2, 5.0, rollout=0, mask=(0,))]
    found = token_advantages(samples, Estimator(name="reinforce_plus_plus"))
    assert found.returns[0].tolist() == pytest.approx([1.0, 1.0])
    assert found.returns[1].tolist() == pytest.approx([0.2, 0.0])


@pytest.mark.parametrize("name", NAMES)
def test_a_rollout_without_trained_tokens_and_an_empty_batch_are_no_error(name):
    samples = [row(0, 1.0), row(1, 0.0, mask=(0, 0))]
    found = token_advantages(samples, Estimator(name=name), TokenInputs(values={0: [0.0, 0.0]}))
    assert found.advantages[1].tolist() == [0.0, 0.0]
    assert token_advantages([], Estimator(name=name)).advantages == {}


def test_errors_name_rollout_sample_and_lengths():
    samples = [row(4, 1.0, rollout=7), row(5, 0.0, rollout=8)]
    values = {4: [0.0, 0.0], 5: [0.0]}
    with pytest.raises(
        DataError, match=r"rollout 8, sample 5: values has length 1, the response has 2 tokens"
    ):
        token_advantages(samples, Estimator(name="ppo"), TokenInputs(values=values))
    with pytest.raises(DataError, match=r"rollout 7, sample 4: values are missing"):
        token_advantages(samples, Estimator(name="ppo"))
    with pytest.raises(DataError, match=r"rollout 8, sample 5: values of its 2 trained tokens"):
        token_advantages(samples, Estimator(name="ppo"), TokenInputs(values=values | {5: [0.0, math.nan]}))
    with pytest.raises(DataError, match=r"rollout 8, sample 4: two samples"):
        token_advantages([samples[0], replace(samples[1], index=4)], Estimator())
    with pytest.raises(DataError, match=r"rollout 7, sample 6: group 3, but sample 4"):
        token_advantages([samples[0], replace(samples[0], index=6, group_index=3)], Estimator())
    with pytest.raises(RewardError, match=r"rollout 7, sample 4: the reward nan"):
        token_advantages([row(4, math.nan, rollout=7)], Estimator())


def test_values_may_be_tensors_and_do_not_keep_a_gradient():
    values = {0: torch.zeros(2, requires_grad=True)}
    found = token_advantages([row(0, 1.0)], Estimator(name="ppo"), TokenInputs(values=values))
    assert found.advantages[0].tolist() == [1.0, 1.0]
    assert not found.advantages[0].requires_grad


def test_unknown_estimators_are_refused():
    assert estimator_name("rloo") == "rloo"
    with pytest.raises(ValueError, match="grpo2"):
        estimator_name("grpo2")

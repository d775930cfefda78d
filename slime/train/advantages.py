"""Advantages of every trained token, for all estimators.

Invariant: they come from ids and from the rollout's trained tokens in order (rows by ascending index), so no
cut of a rollout and no order of the rows changes them; rows that do not vote take no part.
Knows rewards and log-probs; knows no loss, model or optimizer.
"""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal, cast, get_args

import torch

from slime.train.batch import TrainSample
from slime.train.kl import KlType, kl_estimate
from slime.train.normalise import STD_EPSILON, Advantages, group_advantages
from slime.train.returns import discounted_sums, gae, whiten
from slime.train.rewards import is_listed, token_rewards
from slime.train.stream import RowValues, TokenStream

EstimatorName = Literal[
    "grpo", "gspo", "cispo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "ppo"
]
_SCALED = ("grpo", "gspo", "cispo")
_ALWAYS_WHITENED = ("reinforce_plus_plus", "reinforce_plus_plus_baseline")


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimator:
    """How rewards become advantages.

    Attributes:
        name: which estimator; grpo, gspo and cispo share theirs and differ in the loss.
        normalise_rewards: grpo, gspo, cispo, reinforce_plus_plus_baseline: off takes raw rewards instead of
            differences to the group.
        scale_by_std: grpo, gspo, cispo: divide by the group's standard deviation; off is Dr.GRPO.
        gamma: discount per trained token (ppo, reinforce_plus_plus).
        lambd: decay of GAE (ppo).
        kl_coef: weight of the KL penalty in the reward.
        kl_type: its estimator.
        whiten: whiten over the trained tokens of the batch; the REINFORCE++ estimators always do.
        distillation_coef: weight of the on-policy distillation term.
    """

    name: EstimatorName = "grpo"
    normalise_rewards: bool = True
    scale_by_std: bool = True
    gamma: float = 1.0
    lambd: float = 1.0
    kl_coef: float = 0.0
    kl_type: KlType = "k1"
    whiten: bool = False
    distillation_coef: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenInputs:
    """What an estimator may need, by sample index, one a response token.

    Attributes:
        log_probs: the policy's that trains, before the first step (KL in reward, distillation).
        ref_log_probs: the reference model's (KL in reward).
        values: the critic's value of the state before each token (ppo).
        teacher_log_probs: the teacher's (distillation).
        advantages: the user's own; they take the place of the estimator's.
        returns: value targets that came with them.
    """

    log_probs: RowValues | None = None
    ref_log_probs: RowValues | None = None
    values: RowValues | None = None
    teacher_log_probs: RowValues | None = None
    advantages: RowValues | None = None
    returns: RowValues | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenAdvantages:
    """Advantages by sample index, [response_length] float64 each, 0.0 on tokens that do not train.

    Attributes:
        returns: value targets (ppo) or discounted returns (reinforce_plus_plus), likewise; None for others.
        rollout_rewards: each voting rollout's reward; with listed rewards the mean over its trained tokens of
            what was still to come.
        groups: number of groups with a vote.
        zero_std_groups: groups of two or more whose rewards were all equal, by that reward.
        metrics: means over trained tokens: ``kl`` and ``opd_reverse_kl``, where they were computed.
    """

    advantages: Mapping[int, torch.Tensor]
    returns: Mapping[int, torch.Tensor] | None
    rollout_rewards: Mapping[int, float]
    groups: int
    zero_std_groups: Mapping[float, int]
    metrics: Mapping[str, float]


def estimator_name(name: str) -> EstimatorName:
    """`name` as an `EstimatorName`.

    Raises:
        ValueError: there is no such estimator.
    """
    if name not in get_args(EstimatorName):
        raise ValueError(
            f"advantage estimator must be one of {', '.join(get_args(EstimatorName))}; got {name!r}"
        )
    return cast(EstimatorName, name)


def token_advantages(
    samples: Sequence[TrainSample], estimator: Estimator, inputs: TokenInputs | None = None
) -> TokenAdvantages:
    """Advantages of all rows that vote.

    With R_t what the rollout earns from token t on (its reward, where that is one number):

    * grpo, gspo, cispo: (R_t - group mean) / (group std + 1e-6) - kl_coef KL_t; see `group_advantages`.
    * rloo: R_t - mean of the group's other rollouts - kl_coef KL_t (arXiv:2402.14740); alone in its group a
      rollout has no baseline and gives 0.
    * reinforce_plus_plus: whitened returns of r_t - kl_coef KL_t, discounted by gamma (arXiv:2501.03262).
    * reinforce_plus_plus_baseline: whitened R_t - group mean - kl_coef KL_t (the same, its second variant).
    * ppo: GAE of r_t - kl_coef KL_t and the critic's values; see `gae`.

    After each, on-policy distillation subtracts distillation_coef (log pi - log pi_teacher), the token's part
    of the reverse KL (https://thinkingmachines.ai/blog/on-policy-distillation).

    Args:
        samples: all rows of the batch, in any order; rewards may be of any form of `slime.train.rewards`.
        inputs: per-token values of the rows that vote.

    Raises:
        RewardError: a reward that is not finite or does not fit its row.
        DataError: inputs that are missing, of another length or not finite, or ids that contradict; names
            rollout, sample and lengths.
    """
    stream, given = TokenStream.of(samples), inputs or TokenInputs()
    rows, beyond = _reward_rows(stream)
    votes = _votes(rows, estimator)
    metrics: dict[str, torch.Tensor] = {}
    penalty = torch.zeros(int(stream.lengths.sum()), dtype=torch.float64)
    returns = None
    if estimator.kl_coef:
        metrics["kl"] = _reference_kl(stream, given, estimator.kl_type)
        penalty = estimator.kl_coef * metrics["kl"]
    if given.advantages is not None:
        advantages = stream.gather("advantages", given.advantages)
        returns = None if given.returns is None else stream.gather("returns", given.returns)
    elif estimator.name in ("ppo", "reinforce_plus_plus"):
        advantages, returns = _from_returns(stream, given, estimator, penalty)
    else:
        by_row = _leave_one_out(rows, votes) if estimator.name == "rloo" else votes.by_index
        advantages = _spread(rows, by_row) + beyond / _spread(rows, _scales(rows, votes, estimator)) - penalty
    if estimator.whiten or (given.advantages is None and estimator.name in _ALWAYS_WHITENED):
        advantages = whiten(advantages)
    if estimator.distillation_coef:
        metrics["opd_reverse_kl"] = _reverse_kl(stream, given)
        advantages = advantages - estimator.distillation_coef * metrics["opd_reverse_kl"]
    return TokenAdvantages(
        advantages=stream.scatter(advantages),
        returns=None if returns is None else stream.scatter(returns),
        rollout_rewards=votes.rollout_rewards,
        groups=votes.groups,
        zero_std_groups=votes.zero_std_groups,
        metrics={name: float(value.mean()) if len(value) else 0.0 for name, value in metrics.items()},
    )


def _votes(rows: Sequence[TrainSample], estimator: Estimator) -> Advantages:
    centred = estimator.name in (*_SCALED, "reinforce_plus_plus_baseline")
    return group_advantages(
        rows,
        normalise=estimator.normalise_rewards and centred,
        scale_by_std=estimator.scale_by_std and estimator.name in _SCALED,
    )


def _from_returns(
    stream: TokenStream, given: TokenInputs, estimator: Estimator, penalty: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages and returns [T] of the estimators that look at the rollout's rewards in time."""
    rewards = _token_rewards(stream) - penalty
    if estimator.name == "reinforce_plus_plus":
        returns = discounted_sums(rewards, stream.lengths, estimator.gamma)
        return returns, returns
    values = _gather(stream, "values", given.values)
    return gae(rewards, values, stream.lengths, gamma=estimator.gamma, lambd=estimator.lambd)


def _leave_one_out(rows: Sequence[TrainSample], votes: Advantages) -> dict[int, float]:
    """Reward minus the mean of the votes of the group's other rollouts, exact before the one rounding."""
    members: dict[int, set[int]] = defaultdict(set)
    for row in rows:
        members[row.group_index].add(row.rollout_id)
    exact = {rollout: Fraction(vote) for rollout, vote in votes.rollout_rewards.items()}
    totals = {group: sum((exact[r] for r in ids), Fraction(0)) for group, ids in members.items()}

    def advantage(row: TrainSample) -> float:
        own, others = exact[row.rollout_id], len(members[row.group_index]) - 1
        baseline = (totals[row.group_index] - own) / others if others else own
        return float(Fraction(votes.by_index[row.index]) - baseline)

    return {row.index: advantage(row) for row in rows}


def _scales(rows: Sequence[TrainSample], votes: Advantages, estimator: Estimator) -> dict[int, float]:
    """By row: what `group_advantages` divided by."""
    if not (estimator.normalise_rewards and estimator.scale_by_std and estimator.name in _SCALED):
        return {row.index: 1.0 for row in rows}
    members: dict[int, dict[int, float]] = defaultdict(dict)
    for row in rows:
        members[row.group_index][row.rollout_id] = votes.rollout_rewards[row.rollout_id]
    deviations = {
        group: statistics.stdev(found.values()) if len(found) > 1 else 0.0 for group, found in members.items()
    }
    scales = {group: value + STD_EPSILON if value else 1.0 for group, value in deviations.items()}
    return {row.index: scales[row.group_index] for row in rows}


def _reward_rows(stream: TokenStream) -> tuple[list[TrainSample], torch.Tensor]:
    """Rows of one reward each, their places along the line as indices, and [T] what tokens see beyond it.

    A rollout with one number a row keeps its rows, and its tokens see that number. One with listed rewards
    becomes one row, whose reward is the mean over its trained tokens of the rewards to come.
    """
    to_go = discounted_sums(_token_rewards(stream), stream.lengths, 1.0)
    seen_by = torch.split(to_go, stream.lengths.tolist())
    rows: list[TrainSample] = []
    beyond = [to_go.new_zeros(0)]
    for siblings, seen in zip(stream.rollouts.values(), seen_by, strict=True):
        mean, listed = _exact_mean(seen), is_listed(siblings)
        rows += [_with_reward(siblings[0], mean, len(seen))] if listed else siblings
        beyond.append(seen - mean if listed else torch.zeros_like(seen))
    return [replace(row, index=place) for place, row in enumerate(rows)], torch.cat(beyond)


def _exact_mean(values: torch.Tensor) -> float:
    """Mean by differences to the first, so that the mean of equal values is that value; 0 of none."""
    return float(values[0] + (values - values[0]).mean()) if len(values) else 0.0


def _with_reward(sample: TrainSample, reward: float, size: int) -> TrainSample:
    return replace(sample, reward=reward, tokens=(), response_length=size, loss_mask=(1,) * size)


def _token_rewards(stream: TokenStream) -> torch.Tensor:
    placed = [row for siblings in stream.rollouts.values() for row in token_rewards(siblings)]
    return torch.tensor([*itertools.chain.from_iterable(placed)], dtype=torch.float64)[stream.mask]


def _spread(rows: Sequence[TrainSample], by_row: Mapping[int, float]) -> torch.Tensor:
    values = torch.tensor([by_row[row.index] for row in rows], dtype=torch.float64)
    return values.repeat_interleave(torch.tensor([row.trained_tokens for row in rows], dtype=torch.long))


def _reference_kl(stream: TokenStream, given: TokenInputs, kind: KlType) -> torch.Tensor:
    ours = _gather(stream, "log_probs", given.log_probs)
    return kl_estimate(ours, _gather(stream, "ref_log_probs", given.ref_log_probs), kind).double()


def _reverse_kl(stream: TokenStream, given: TokenInputs) -> torch.Tensor:
    ours = _gather(stream, "log_probs", given.log_probs)
    return ours - _gather(stream, "teacher_log_probs", given.teacher_log_probs)


def _gather(stream: TokenStream, name: str, values: RowValues | None) -> torch.Tensor:
    return stream.gather(name, {} if values is None else values)

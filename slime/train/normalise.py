"""Rewards become advantages: the group-relative baseline of GRPO, by ids.

Invariant: one vote a rollout however many rows it has, in the group that its `group_index` names; rows that
do not vote change nothing. Means are exact (rationals), so a group of equal rewards gives exactly 0.0.
Knows no tensors; order and number of rows mean nothing to it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from slime.errors import DataError, RewardError
from slime.train.batch import TrainSample

STD_EPSILON = 1e-6


@dataclass(frozen=True, slots=True)
class Advantages:
    """Advantages by sample index (rows that vote only), and what the groups looked like.

    Attributes:
        by_index: advantage of every token of the sample.
        rollout_rewards: each voting rollout's reward.
        groups: number of groups with a vote.
        zero_std_groups: groups of two or more whose rewards were all equal, by that reward.
    """

    by_index: Mapping[int, float]
    rollout_rewards: Mapping[int, float]
    groups: int
    zero_std_groups: Mapping[float, int]


def group_advantages(
    samples: Sequence[TrainSample], *, normalise: bool = True, scale_by_std: bool = True
) -> Advantages:
    """Reward minus the group's mean, divided by (unbiased standard deviation + 1e-6).

    Siblings normally share their rollout's reward. Where they differ on purpose (credit per segment), the
    rollout votes with their mean weighted by trained tokens, and each row keeps its own difference. A
    standard deviation that does not exist (group of one) or is zero does not scale.

    Args:
        samples: all rows of the batch, in any order.
        normalise: off gives raw rewards.
        scale_by_std: off only centres (Dr.GRPO, arXiv:2503.20783).

    Source: GRPO, arXiv:2402.03300, equation 3.

    Raises:
        RewardError: a voting row without a finite reward.
        DataError: two rows with one index, or a rollout in two groups.
    """
    voting = [sample for sample in samples if sample.votes]
    _check_ids(samples)
    rewards = {sample.index: _exact_reward(sample) for sample in voting}
    votes = _rollout_votes(voting, rewards)
    groups: dict[int, set[int]] = defaultdict(set)
    for sample in voting:
        groups[sample.group_index].add(sample.rollout_id)
    statistics = {
        group: _mean_and_scale([votes[rollout] for rollout in rollouts], scale_by_std)
        for group, rollouts in groups.items()
    }
    by_index: dict[int, float] = {}
    for sample in voting:
        mean, scale = statistics[sample.group_index] if normalise else (Fraction(0), 1.0)
        by_index[sample.index] = float(rewards[sample.index] - mean) / scale
    return Advantages(
        by_index=by_index,
        rollout_rewards={rollout: float(vote) for rollout, vote in votes.items()},
        groups=len(groups),
        zero_std_groups=_equal_groups([[votes[r] for r in rollouts] for rollouts in groups.values()]),
    )


def _check_ids(samples: Iterable[TrainSample]) -> None:
    seen: set[int] = set()
    group_of: dict[int, int] = {}
    for sample in samples:
        if sample.index in seen:
            raise DataError("two samples of the batch carry this index", place=f"sample {sample.index}")
        seen.add(sample.index)
        if group_of.setdefault(sample.rollout_id, sample.group_index) != sample.group_index:
            raise DataError(
                f"its samples name group {group_of[sample.rollout_id]} and group {sample.group_index}",
                place=f"rollout {sample.rollout_id}",
                remedy="copy group_index and rollout_id to every sample that a generate hook makes",
            )


def _exact_reward(sample: TrainSample) -> Fraction:
    reward = sample.reward
    if isinstance(reward, int | float) and math.isfinite(reward):
        return Fraction(reward)
    raise RewardError(
        f"sample {sample.index} has the reward {reward!r}, which is not a finite number",
        place=f"rollout {sample.rollout_id}",
        remedy="let the reward hook return a float, or raise where it has none",
    )


def _rollout_votes(samples: Iterable[TrainSample], rewards: Mapping[int, Fraction]) -> dict[int, Fraction]:
    """Each rollout's reward: the mean of its rows, weighted by trained tokens."""
    rows: dict[int, list[TrainSample]] = defaultdict(list)
    for sample in samples:
        rows[sample.rollout_id].append(sample)
    votes = {}
    for rollout, siblings in rows.items():
        weights = [sample.trained_tokens for sample in siblings]
        if not any(weights):
            weights = [1] * len(siblings)
        total = sum((rewards[s.index] * w for s, w in zip(siblings, weights, strict=True)), Fraction(0))
        votes[rollout] = total / sum(weights)
    return votes


def _mean_and_scale(votes: Sequence[Fraction], scale_by_std: bool) -> tuple[Fraction, float]:
    mean = sum(votes, Fraction(0)) / len(votes)
    squares = sum(((vote - mean) ** 2 for vote in votes), Fraction(0))
    if not scale_by_std or squares == 0:
        return mean, 1.0
    return mean, math.sqrt(squares / (len(votes) - 1)) + STD_EPSILON


def _equal_groups(groups: Iterable[Sequence[Fraction]]) -> dict[float, int]:
    counts: dict[float, int] = defaultdict(int)
    for votes in groups:
        if len(votes) > 1 and len(set(votes)) == 1:
            counts[float(votes[0])] += 1
    return dict(counts)

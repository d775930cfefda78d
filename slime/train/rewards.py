"""What a reward may be, and where in its rollout it falls.

A reward is one number for the row, a number a turn, or a number a response token. Invariant: a rollout's
rewards, seen from its trained tokens in order, are the same however the rollout is cut into rows.
Torch-free; knows no baselines.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from numbers import Real
from typing import TypeGuard

from slime.errors import RewardError
from slime.train.batch import Reward, TokenRewards, TrainSample, TurnRewards

# Reward / K was rounded once by its author; more digits than these cannot be recovered from the K parts.
_SUM_DIGITS = 12


def read_reward(value: object, *, place: str) -> Reward:
    """What a reward hook returned, as a `Reward`.

    Args:
        value: a number, ``{"turns": [...]}``, ``{"tokens": [...]}``, or a bare list, which is one number a
            response token; what ``--reward-key`` chose, if set.
        place: names the rollout and sample in errors.

    Raises:
        RewardError: another form, or a number that is not finite.
    """
    if isinstance(value, Real) and math.isfinite(value):
        return float(value)
    kind, numbers = next(iter(value.items())) if is_listed_form(value) else ("tokens", value)
    if _finite_numbers(numbers):
        listed = tuple(map(float, numbers))
        return TurnRewards(listed) if kind == "turns" else TokenRewards(listed)
    raise RewardError(
        f"the reward {value!r} is no finite number and no list of them",
        place=place,
        remedy='return a number, {"turns": [...]} or {"tokens": [...]}; raise where there is no reward',
    )


def is_listed_form(value: object) -> TypeGuard[Mapping[str, object]]:
    """Whether a value is ``{"turns": ...}`` or ``{"tokens": ...}``, and no dict of named rewards."""
    return isinstance(value, Mapping) and len(value) == 1 and next(iter(value)) in ("turns", "tokens")


def total_reward(reward: Reward) -> float:
    """What the row earned in all."""
    return math.fsum(reward.values) if isinstance(reward, TurnRewards | TokenRewards) else reward


def reward_of(sample: TrainSample) -> Reward:
    """The row's reward, checked.

    Raises:
        RewardError: not finite, not one a turn or token, or on a token that does not train.
    """
    reward = sample.reward
    if isinstance(reward, TurnRewards | TokenRewards):
        check_listed(reward, sample.loss_mask, place=_place(sample))
        return reward
    return read_reward(reward, place=_place(sample))


def token_rewards(siblings: Sequence[TrainSample]) -> list[list[float]]:
    """Rewards of a rollout at its response tokens; the sum from a trained token onward is what it earned.

    Listed rewards stay where they are. One number for all rows is paid once, at the rollout's last trained
    token. Numbers that differ between rows (credit per segment) are paid as differences at the end of each
    row, so that every trained token still sees the number of its own row: r_k = (r_k - r_{k+1}) + ... + r_K.

    Args:
        siblings: all voting rows of one rollout, in order.

    Returns:
        For each row, one number a response token.

    Raises:
        RewardError: see `reward_of`; or numbers and lists in one rollout.
    """
    rewards = [reward_of(sample) for sample in siblings]
    listed = [isinstance(reward, TurnRewards | TokenRewards) for reward in rewards]
    if any(listed) and not all(listed):
        number, other = siblings[listed.index(False)], siblings[listed.index(True)]
        raise RewardError(
            f"its reward is one number, that of sample {other.index} is a list",
            place=_place(number),
            remedy="give all samples of a rollout the same form of reward",
        )
    placed = [_listed_tokens(sample, reward) for sample, reward in zip(siblings, rewards, strict=True)]
    if not any(listed):
        _pay_differences(siblings, placed)
    return placed


def is_listed(siblings: Sequence[TrainSample]) -> bool:
    """Whether the rollout of these rows has listed rewards (`token_rewards` sees to it that all have)."""
    return isinstance(siblings[0].reward, TurnRewards | TokenRewards)


def rollout_rows(samples: Sequence[TrainSample]) -> dict[int, list[TrainSample]]:
    """Voting rows by rollout id, both ascending: rollouts by id, their rows by index."""
    rows: dict[int, list[TrainSample]] = defaultdict(list)
    for sample in sorted(samples, key=lambda s: (s.rollout_id, s.index)):
        if sample.votes:
            rows[sample.rollout_id].append(sample)
    return dict(rows)


def sum_sibling_rewards(samples: Sequence[TrainSample]) -> list[TrainSample]:
    """Rows that carry their rollout's reward, from rows that each carry a share (``--sibling-reward sum``).

    For rewards written as reward / K on each of K samples. Samples that were removed from training still
    hold their share. The sum is rounded to 12 significant digits, as the shares were rounded: 0.3 in 7
    parts is 0.3 again. Listed rewards add up by themselves and are left alone.

    Args:
        samples: all rows of the batch, in any order; the result keeps it.

    Raises:
        RewardError: a voting row without a finite reward.
    """
    shares: dict[int, list[Fraction]] = defaultdict(list)
    for sample in samples:
        reward = reward_of(sample) if sample.votes else sample.reward
        if isinstance(reward, int | float) and math.isfinite(reward):
            shares[sample.rollout_id].append(Fraction(reward))
    totals = {rollout: float(f"{float(sum(parts)):.{_SUM_DIGITS}g}") for rollout, parts in shares.items()}
    return [
        replace(sample, reward=totals[sample.rollout_id])
        if sample.votes and isinstance(sample.reward, int | float)
        else sample
        for sample in samples
    ]


def turn_ends(loss_mask: Sequence[int]) -> list[int]:
    """Positions of the last token of each unbroken run of trained tokens."""
    pairs = itertools.pairwise([*loss_mask, 0])
    return [t for t, (mask, after) in enumerate(pairs) if mask and not after]


def _listed_tokens(sample: TrainSample, reward: Reward) -> list[float]:
    if isinstance(reward, TokenRewards):
        return list(reward.values)
    placed = [0.0] * sample.response_length
    if isinstance(reward, TurnRewards):
        for position, value in zip(turn_ends(sample.loss_mask), reward.values, strict=True):
            placed[position] = value
    return placed


def _pay_differences(siblings: Sequence[TrainSample], placed: Sequence[list[float]]) -> None:
    trained = [(s, row) for s, row in zip(siblings, placed, strict=True) if s.trained_tokens]
    after = 0.0
    for sample, row in reversed(trained):
        reward = total_reward(sample.reward)
        row[turn_ends(sample.loss_mask)[-1]] = reward - after
        after = reward


def check_listed(reward: Reward, loss_mask: Sequence[int], *, place: str) -> None:
    """Check that listed rewards fit their row.

    Raises:
        RewardError: not one a turn or response token, not finite, or on a token that does not train.
    """
    if not isinstance(reward, TurnRewards | TokenRewards):
        return
    turns, length = len(turn_ends(loss_mask)), len(loss_mask)
    unit, needed = ("turn", turns) if isinstance(reward, TurnRewards) else ("token", length)
    if len(reward.values) != needed:
        raise RewardError(
            f"{len(reward.values)} rewards, one a {unit}, for {needed} {unit}s "
            f"(response of {length} tokens, {turns} turns of trained ones)",
            place=place,
        )
    if not _finite_numbers(reward.values):
        raise RewardError(f"its rewards of {needed} {unit}s are not all finite numbers", place=place)
    if isinstance(reward, TokenRewards):
        stray = [t for t, (r, m) in enumerate(zip(reward.values, loss_mask, strict=True)) if r and not m]
        if stray:
            raise RewardError(
                f"reward on response token {stray[0]} of {needed}, which does not train",
                place=place,
                remedy="put it on the trained token that earned it",
            )


def _finite_numbers(values: object) -> TypeGuard[Sequence[float]]:
    if not isinstance(values, Sequence) or isinstance(values, str | bytes):
        return False
    return all(isinstance(value, Real) and math.isfinite(value) for value in values)


def _place(sample: TrainSample) -> str:
    return f"rollout {sample.rollout_id}, sample {sample.index}"

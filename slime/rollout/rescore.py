"""Scoring stored rollouts again: what another reward, or a mended one, would have said.

Invariant: nothing is generated, and the samples come out in the order they went in; a rollout that cannot be
scored fails with its reason, as in training. One whose only failure was its reward is scored anew.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from slime.errors import RolloutFailedError
from slime.rollout.dump import grouped
from slime.rollout.outcome import BEFORE_FAILURE, Failed, Member, MemberGroup, Rollout, rollout_reward
from slime.rollout.rewarding import INVALID_KEY
from slime.rollout.runner import Call, RolloutRunner
from slime.rollout.tasks import all_of
from slime.train.rewards import read_reward, total_reward
from slime.utils.types import Sample

REWARD_FAILURE = "reward: "
_SCORED = (Sample.Status.COMPLETED, Sample.Status.TRUNCATED)


@dataclass(frozen=True, slots=True)
class Rescored:
    """One rollout before and after.

    Attributes:
        old, new: its reward; None where it has none (failed, or a dict without the key).
        failure: why it could not be scored now.
        invalid: why it counts as having no answer.
    """

    group_index: int | None
    rollout_id: int | None
    old: float | None
    new: float | None
    failure: str | None = None
    invalid: str | None = None

    @property
    def agrees(self) -> bool | None:
        """Whether both rewards are equal; None where one is missing."""
        if self.old is None or self.new is None:
            return None
        return math.isclose(self.old, self.new, rel_tol=1e-9, abs_tol=1e-9)


@dataclass(slots=True)
class Rescoring:
    """What came of a dump.

    Attributes:
        rollouts: those that were scored, in order.
        untouched: the others, by why they are left as they are.
    """

    rollouts: list[Rescored] = field(default_factory=list)
    untouched: Counter[str] = field(default_factory=Counter)

    @property
    def compared(self) -> list[Rescored]:
        """Rollouts with both rewards."""
        return [rollout for rollout in self.rollouts if rollout.agrees is not None]

    @property
    def failures(self) -> Counter[str]:
        """Rollouts that could not be scored, by reason."""
        return Counter(rollout.failure for rollout in self.rollouts if rollout.failure is not None)

    @property
    def invalid(self) -> Counter[str]:
        """Rollouts without an answer, by reason."""
        return Counter(rollout.invalid for rollout in self.rollouts if rollout.invalid is not None)


async def rescore(samples: Sequence[Sample], args: Any, *, concurrency: int) -> Rescoring:
    """Give the samples of a dump new rewards, in place.

    Args:
        args: the reward flags by name; where a type or hook is set there, it wins over the samples' own.
        concurrency: groups that are scored at once.

    Raises:
        ConfigError: no reward is configured, or one that does not exist.
    """
    result = Rescoring()
    runner = RolloutRunner(args, generate=_never, slots=asyncio.Semaphore(1))
    gate = asyncio.Semaphore(concurrency)

    async def one(group: MemberGroup) -> list[Rescored]:
        async with gate:
            return await _rescore_group(runner, group, args, result.untouched)

    for found in await all_of(one(group) for group in grouped(samples)):
        result.rollouts += found
    return result


async def _rescore_group(
    runner: RolloutRunner, group: MemberGroup, args: Any, untouched: Counter[str]
) -> list[Rescored]:
    members: list[Member] = []
    for member in group:
        reason = _unfit(_siblings(member))
        if reason is None:
            members.append(member)
        else:
            untouched[reason] += 1
    before = [_old_reward(_siblings(member), args) for member in members]
    own = [_prepare(sample, args) for member in members for sample in _siblings(member)]
    if not members:
        return []
    rollouts = await runner.run_group(members, Call(step=None, sampling_params={}))
    for sample, (path, rm_type) in zip(_flat(members), own, strict=True):
        sample.custom_rm_path = path
        if rm_type is not None:
            sample.metadata["rm_type"] = rm_type
    return [_rescored(old, rollout, args) for old, rollout in zip(before, rollouts, strict=True)]


def _unfit(siblings: Sequence[Sample]) -> str | None:
    """Why a rollout is left as it is, or None."""
    for sample in siblings:
        if sample.status in _SCORED:
            continue
        failure = str(sample.metadata.get("failure", ""))
        by_reward = sample.status is Sample.Status.FAILED and failure.startswith(REWARD_FAILURE)
        if not by_reward:
            return sample.status.value if not failure else failure.split(" in ")[0]
    return None


def _prepare(sample: Sample, args: Any) -> tuple[str | None, str | None]:
    """Take the old reward off a sample; returns its own hook and type, which are set aside."""
    before = sample.metadata.pop(BEFORE_FAILURE, None)
    if sample.status is Sample.Status.FAILED:
        status = Sample.Status((before or {}).get("status", Sample.Status.COMPLETED))
        sample.status = status if status in _SCORED else Sample.Status.COMPLETED
        sample.remove_sample = bool((before or {}).get("remove_sample", False))
    sample.reward = None
    for key in ("failure", "raw_reward", INVALID_KEY):
        sample.metadata.pop(key, None)
    own = sample.custom_rm_path, sample.metadata.get("rm_type")
    if getattr(args, "custom_rm_path", None) or getattr(args, "rm_type", None):
        sample.custom_rm_path = None
        sample.metadata.pop("rm_type", None)
    return own


def _rescored(old: float | None, rollout: Rollout, args: Any) -> Rescored:
    failure = rollout.outcome.reason if isinstance(rollout.outcome, Failed) else None
    marks = [mark for sample in rollout.samples if (mark := sample.metadata.get(INVALID_KEY))]
    return Rescored(
        group_index=rollout.group_index,
        rollout_id=rollout.rollout_id,
        old=old,
        new=rollout_reward(rollout.samples, args) if failure is None else None,
        failure=failure,
        invalid=marks[0] if marks and failure is None else None,
    )


def _old_reward(siblings: Sequence[Sample], args: Any) -> float | None:
    """The mean of what the siblings had; None where one has none, or a dict without the key."""
    key = getattr(args, "reward_key", None)
    values = [s.reward.get(key) if isinstance(s.reward, dict) and key else s.reward for s in siblings]
    if any(value is None or (isinstance(value, dict) and not key) for value in values):
        return None
    totals = [total_reward(read_reward(value, place="stored rollout")) for value in values]
    return math.fsum(totals) / len(totals)


def _siblings(member: Member) -> list[Sample]:
    return member if isinstance(member, list) else [member]


def _flat(members: Sequence[Member]) -> Iterator[Sample]:
    for member in members:
        yield from _siblings(member)


async def _never(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    raise RolloutFailedError("a stored rollout is not generated again", place=f"rollout {sample.rollout_id}")

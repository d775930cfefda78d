"""What came of one rollout: its samples and a typed outcome.

Invariant: only `Completed` and `Truncated` rollouts have a reward and vote; a failure carries a reason and a
place, never a number (law 4).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from slime.train.rewards import read_reward, total_reward
from slime.utils.types import Sample

BEFORE_FAILURE = "before_failure"
"""Key of `Sample.metadata` for what a failure wrote over, so that another check can undo it."""
INTERRUPTED = "its engine calls were ended"
"""Why a rollout is aborted whose hook went on when it was stopped."""
Member: TypeAlias = Sample | list[Sample]
"""One rollout as hooks see it inside a group: a sample, or the siblings of a fan-out."""
MemberGroup: TypeAlias = list[Member]


@dataclass(frozen=True, slots=True)
class Completed:
    """The agent finished."""


@dataclass(frozen=True, slots=True)
class Truncated:
    """A length limit ended it."""


@dataclass(frozen=True, slots=True)
class Aborted:
    """Ended from outside, or given up by the hook (status ABORTED)."""

    reason: str


@dataclass(frozen=True, slots=True)
class Failed:
    """An error ended it.

    Attributes:
        reason: short and of few values, for counts, e.g. ``generate: ValueError``.
        place: hook or function in which it happened.
        detail: the whole message.
    """

    reason: str
    place: str
    detail: str


Outcome: TypeAlias = Completed | Truncated | Aborted | Failed


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds in each phase."""

    queued: float = 0.0
    generate: float = 0.0
    reward: float = 0.0

    @property
    def total(self) -> float:
        """All of it."""
        return self.queued + self.generate + self.reward


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One execution of the agent on a prompt.

    Attributes:
        samples: its token rows, never empty; `fan_out` tells whether the hook gave a list.
        error: the exception behind a `Failed` outcome.
    """

    group_index: int | None
    rollout_id: int | None
    samples: tuple[Sample, ...]
    fan_out: bool
    outcome: Outcome
    timings: Timings = field(default_factory=Timings)
    error: BaseException | None = None

    @property
    def valid(self) -> bool:
        """True if it may train and vote."""
        return isinstance(self.outcome, Completed | Truncated)

    def as_failed(self, failed: Failed, error: BaseException | None) -> Rollout:
        """The same rollout, ended by an error after all."""
        rollout = dataclasses.replace(self, outcome=failed, error=error)
        rollout.void_unless_valid()
        return rollout

    def void_unless_valid(self) -> None:
        """Mark the samples of a rollout that does not count: no reward, out of the loss, and why."""
        if self.valid:
            return
        for sample in self.samples:
            if isinstance(self.outcome, Failed):
                before = {"status": sample.status.value, "remove_sample": sample.remove_sample}
                sample.metadata.setdefault(BEFORE_FAILURE, before)
                sample.status = Sample.Status.FAILED
                sample.metadata["failure"] = (
                    f"{self.outcome.reason} in {self.outcome.place}: {self.outcome.detail}"
                )
            sample.reward, sample.remove_sample = None, True

    @property
    def member(self) -> Member:
        """The samples as hooks see them in a group."""
        return list(self.samples) if self.fan_out else self.samples[0]

    @property
    def removed(self) -> bool:
        """True if a hook took all of it out of the loss."""
        return all(sample.remove_sample for sample in self.samples)

    @property
    def response_length(self) -> int:
        """Response tokens of all siblings."""
        return sum(sample.response_length for sample in self.samples)

    def reward(self, args: Any) -> float:
        """The rollout's one reward: what its siblings share, else their mean."""
        return rollout_reward(self.samples, args)


def rollout_reward(siblings: Sequence[Sample], args: Any) -> float:
    """One number for the siblings of a rollout: the reward that they share, else their mean.

    Rewards a turn or a token add up.
    """
    read = [read_reward(s.get_reward_value(args), place=f"rollout {s.rollout_id}") for s in siblings]
    rewards = list(map(total_reward, read))
    if not all(isinstance(reward, float) for reward in read):
        return math.fsum(rewards)
    return rewards[0] if len(set(rewards)) == 1 else math.fsum(rewards) / len(rewards)


def failure_reason(outcome: Outcome) -> str | None:
    """The reason under which an outcome counts as failed, None if it does not."""
    if isinstance(outcome, Failed):
        return outcome.reason
    return f"aborted: {outcome.reason}" if isinstance(outcome, Aborted) else None


def outcome_of(samples: Sequence[Sample], place: str) -> Outcome:
    """What the statuses that user code or the engine set say about a rollout; PENDING becomes COMPLETED."""
    for sample in samples:
        if sample.status is Sample.Status.PENDING:
            sample.status = Sample.Status.COMPLETED
    for sample in samples:
        said = sample.metadata.get("abort_reason") or sample.metadata.get("failure")
        if sample.status is Sample.Status.FAILED:
            return Failed("generate: FAILED", place, str(said or "returned a sample with status FAILED"))
        if sample.status is Sample.Status.ABORTED:
            return Aborted(str(said or "engine or hook"))
    return Truncated() if samples[-1].status is Sample.Status.TRUNCATED else Completed()

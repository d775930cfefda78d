"""Policies of the scheduler: when to start a group, when a batch is full, what becomes of work in flight.

Invariant: a policy only looks and decides; it holds no task, sample or clock. Another way to overlap rollout
and training is another policy of the same scheduler.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Protocol


class Leftover(enum.Enum):
    """What becomes of groups that run, or are finished and unused, when a batch closes or weights change."""

    REQUEUE = "requeue"
    """Abort what runs and put its prompts back fresh; put back finished groups with their rewards."""
    RESTART = "restart"
    """Abort what runs and put all back fresh, finished groups too: which of them are finished is chance."""
    WAIT = "wait"
    """Let what runs finish, and keep it for the next batch."""
    KEEP = "keep"
    """Let it run on, and keep what is finished for the next batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What a policy sees, in groups.

    Attributes:
        wanted: size of the batch.
        accepted: groups in the batch so far.
        running: groups in flight.
    """

    wanted: int
    accepted: int
    running: int


class Policy(Protocol):
    """Decides for the scheduler."""

    @property
    def ordered(self) -> bool:
        """Whether groups are judged in the order in which they started, whatever finishes first."""
        ...

    def admit(self, view: View) -> int:
        """How many groups to start now."""
        ...

    def is_full(self, view: View) -> bool:
        """Whether the batch closes now."""
        ...

    def at_close(self, view: View) -> Leftover:
        """What becomes of the rest when a batch closes."""
        ...

    def at_update(self, view: View) -> Leftover:
        """What becomes of work in flight before the weights change."""
        ...


@dataclass(frozen=True, slots=True)
class Synchronous:
    """Rollout and training take turns: nothing is in flight between batches.

    Attributes:
        outstanding: groups accepted or running while the batch fills (``--over-sampling-batch-size``).
            Those beyond the batch spare the wait for slow groups; a dropped group is replaced by one.
        ordered: make the batch, and what goes back, a function of the rollouts alone, not of their timing.
            Groups beyond the batch then only start ahead; they spare no wait.
    """

    outstanding: int
    ordered: bool = False

    def admit(self, view: View) -> int:
        """Refill by what is missing."""
        return max(0, max(self.outstanding, view.wanted) - view.accepted - view.running)

    def is_full(self, view: View) -> bool:
        """As soon as enough groups are accepted."""
        return view.accepted >= view.wanted

    def at_close(self, view: View) -> Leftover:
        """The engine must be idle for training."""
        return Leftover.RESTART if self.ordered else Leftover.REQUEUE

    def at_update(self, view: View) -> Leftover:
        """As at a close."""
        return self.at_close(view)

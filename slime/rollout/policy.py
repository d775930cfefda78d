"""Policies of the scheduler: when to start a group, when a batch is full, what becomes of work in flight.

Invariant: a policy only looks and decides; it holds no task, sample or clock. Another way to overlap rollout
and training is another policy of the same scheduler.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Protocol

from slime.rollout.pacing import UNBOUNDED


class Leftover(enum.Enum):
    """What becomes of groups that run, or are finished and unused, when a batch closes or weights change."""

    REQUEUE = "requeue"
    """Abort what runs and put its prompts back fresh; put back finished groups with their rewards."""
    RESTART = "restart"
    """Abort what runs and put all back fresh, finished groups too: which of them are finished is chance."""
    WAIT = "wait"
    """Let what runs finish, and keep it for the next batch."""
    CONTINUE = "continue"
    """End engine calls, and put what runs back with the tokens that it has; finished groups with rewards."""
    KEEP = "keep"
    """Let it run on, and keep what is finished for the next batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What a policy sees, in groups.

    Attributes:
        wanted: size of the batch.
        accepted: groups in the batch so far.
        running: groups in flight.
        finished: groups that are done and in no batch.
        room: groups that may start without breaking the bound on staleness.
    """

    wanted: int
    accepted: int
    running: int
    finished: int = 0
    room: int = UNBOUNDED


class Policy(Protocol):
    """Decides for the scheduler."""

    @property
    def ordered(self) -> bool:
        """Whether groups are judged in the order in which they started, whatever finishes first."""
        ...

    @property
    def continuous(self) -> bool:
        """Whether groups also start between batches."""
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
        partial: continue later what a closing batch interrupts (``--partial-rollout``).
        ordered: make the batch, and what goes back, a function of the rollouts alone, not of their timing.
            Groups beyond the batch then only start ahead; they spare no wait.
    """

    outstanding: int
    partial: bool = False
    ordered: bool = False
    continuous: bool = False

    def admit(self, view: View) -> int:
        """Refill by what is missing."""
        missing = max(self.outstanding, view.wanted) - view.accepted - view.running - view.finished
        return max(0, min(missing, view.room))

    def is_full(self, view: View) -> bool:
        """As soon as enough groups are accepted."""
        return view.accepted >= view.wanted

    def at_close(self, view: View) -> Leftover:
        """The engine must be idle for training."""
        if self.partial:
            return Leftover.CONTINUE
        return Leftover.RESTART if self.ordered else Leftover.REQUEUE

    def at_update(self, view: View) -> Leftover:
        """As at a close."""
        return self.at_close(view)


@dataclass(frozen=True, slots=True)
class FullyAsynchronous:
    """Rollouts go on while batches close, weights change and training runs.

    Attributes:
        most_running: groups in flight.
        waits: let what runs finish before weights change; else it goes on with the new ones.
    """

    most_running: int
    waits: bool = False
    ordered: bool = False
    continuous: bool = True

    def admit(self, view: View) -> int:
        """As many as there is room for."""
        return max(0, min(self.most_running - view.running, view.room))

    def is_full(self, view: View) -> bool:
        """As soon as enough groups are accepted."""
        return view.accepted >= view.wanted

    def at_close(self, view: View) -> Leftover:
        """Nothing stops."""
        return Leftover.KEEP

    def at_update(self, view: View) -> Leftover:
        """The engine pauses for itself."""
        return Leftover.WAIT if self.waits else Leftover.KEEP

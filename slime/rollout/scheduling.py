"""What goes into a scheduler and what comes out of it: its limits, the functions that it calls, its batches.

Values only; knows nothing of how groups are scheduled.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from slime.rollout.accounting import Account
from slime.rollout.group_run import GroupRun
from slime.rollout.outcome import MemberGroup, Rollout
from slime.rollout.stopping import GroupStop
from slime.rollout.tasks import ROLLOUT_SECONDS


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A closed batch.

    Attributes:
        groups: accepted, by group index.
        seen: all groups that were judged in the step, dropped ones too.
        drops: dropped groups by reason.
        age: steps between the oldest token and its training.
    """

    step: int
    groups: list[GroupRun]
    seen: list[GroupRun]
    drops: Counter[str]
    account: Account
    age: int


RunGroup = Callable[[MemberGroup, int, GroupStop], Coroutine[Any, Any, list[Rollout]]]
"""(group, step, its stop) -> its rollouts, one a member."""
Finish = Callable[[list[GroupRun], list[GroupRun]], Coroutine[Any, Any, None]]
"""(accepted, seen): hooks of the full batch."""


async def keep_all(group: MemberGroup, outstanding: int, wanted: int) -> str | None:
    """The filter that drops nothing."""
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Numbers that bound a scheduler.

    Attributes:
        wanted: groups of a batch.
        group_size: rollouts of a group.
        max_failed_ratio: share of failed rollouts that stops a step.
        max_staleness: see `Pacing`.
        wait_seconds: deadline of waits that no rollout's deadline ends: for data, and for new weights.
        late_percentile: a group that holds up finished work is cut when it runs longer than this share of
            the groups before; 1 never cuts.
    """

    wanted: int
    group_size: int
    max_failed_ratio: float = 0.5
    max_staleness: int | None = None
    late_percentile: float = 1.0
    wait_seconds: float = ROLLOUT_SECONDS

"""Collects the groups of one batch: judges each finished group, keeps count of drops and failures.

Invariant: a group is accepted or dropped whole, with a reason; a batch that cannot fill ends with an error
that says why. Knows nothing of tasks or data sources.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from slime.errors import RolloutFailedError
from slime.rollout.accounting import Fate, Ledger
from slime.rollout.failures import FailureBudget
from slime.rollout.group_run import GroupRun
from slime.rollout.outcome import MemberGroup

PROMPTS_PER_WANTED = 64
"""A step that has judged this many groups for each one that it wants is not going to fill."""
TOO_FEW_VALID = "too_few_valid"

Judge = Callable[[MemberGroup, int, int], Awaitable[str | None]]
"""(valid members, groups outstanding, groups wanted) -> why the group is dropped, or None."""


@dataclass(slots=True, kw_only=True)
class Collector:
    """One batch while it fills.

    Attributes:
        accepted: groups of the batch.
        seen: all groups judged, dropped ones too.
        drops: dropped groups by reason.
    """

    step: int
    wanted: int
    judge: Judge
    ledger: Ledger
    budget: FailureBudget
    accepted: list[GroupRun] = field(default_factory=list)
    seen: list[GroupRun] = field(default_factory=list)
    drops: Counter[str] = field(default_factory=Counter)

    async def drop_reason(self, run: GroupRun, still_running: int) -> str | None:
        """Why a finished group is to be dropped, or None. Changes nothing.

        Args:
            still_running: groups that may yet be accepted, without this one.
        """
        if len(run.valid_members) < min(2, len(run.rollouts)):
            return TOO_FEW_VALID
        return await self.judge(run.valid_members, len(self.accepted) + still_running + 1, self.wanted)

    def settle(self, run: GroupRun, reason: str | None) -> None:
        """Accept a finished group, or drop it for this reason.

        Raises:
            RolloutFailedError: too many rollouts of the step failed.
        """
        self.seen.append(run)
        self.budget.record(run.rollouts)
        if reason is None:
            self.accepted.append(run)
        else:
            self.drops[reason] += 1
            run.settle(self.ledger, Fate.FILTERED, reason)
        self.budget.check()

    def check_judged(self) -> None:
        """Stop a step that drops groups without end; prompts whose rollouts still run do not count.

        Raises:
            RolloutFailedError: with the drops and failures by reason.
        """
        if len(self.seen) >= PROMPTS_PER_WANTED * self.wanted:
            raise RolloutFailedError(
                f"{len(self.seen)} prompts gave only {self.standing()}",
                place=f"rollout step {self.step}",
                remedy="the prompts are too easy, too hard or failing for this model; see the reward, and "
                "--dynamic-sampling-filter-path where groups were dropped by a filter",
            )

    def standing(self) -> str:
        """How far the batch is, and what was dropped and failed."""
        drops = ", ".join(f"{reason} {count}" for reason, count in self.drops.most_common())
        dropped = f"; groups dropped: {drops}" if drops else ""
        return f"{len(self.accepted)} of {self.wanted} groups{dropped}{self.budget.summary()}"

"""The one scheduler: takes groups from a data source, runs them, and closes batches as its policy says.

Invariants: every admitted rollout gets exactly one fate in the ledger (law 5); no task outlives the
scheduler; an error of its own work reaches whoever awaits it; groups are taken, dropped or put back whole.
Knows groups, outcomes and a runner; nothing of engines, rewards or training.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from slime.errors import DataError
from slime.rollout.accounting import Account, Fate, Ledger
from slime.rollout.collector import Collector, Judge
from slime.rollout.failures import FailureBudget
from slime.rollout.group_run import GroupRun, copy_of, with_ids
from slime.rollout.inflight import IN_FLIGHT, InFlight
from slime.rollout.outcome import Member, MemberGroup, Rollout
from slime.rollout.policy import Leftover, Policy, View

logger = logging.getLogger(__name__)


class Source(Protocol):
    """The part of a data source that the scheduler uses."""

    def get_samples(self, num_samples: int, /) -> Sequence[Sequence[Member]]:
        """The next groups; fewer or none where it runs out."""
        ...

    def add_samples(self, groups: Any, /) -> None:
        """Take groups back."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A closed batch.

    Attributes:
        groups: accepted, by group index.
        seen: all groups that were judged in the step, dropped ones too.
        drops: dropped groups by reason.
    """

    groups: list[GroupRun]
    seen: list[GroupRun]
    drops: Counter[str]
    account: Account


RunGroup = Callable[[MemberGroup, int], Coroutine[Any, Any, list[Rollout]]]
"""(group, step) -> its rollouts, one a member."""
Finish = Callable[[list[GroupRun], list[GroupRun]], Coroutine[Any, Any, None]]
"""(accepted, seen): hooks of the full batch."""


async def keep_all(group: MemberGroup, outstanding: int, wanted: int) -> str | None:
    """The filter that drops nothing."""
    return None


class Scheduler:
    """Collects batches. An async context manager: leaving it ends all that is in flight.

    Args:
        wanted: groups of a batch.
        group_size: rollouts of a group.
        judge: the dynamic filter.
        finish: called with the full batch before its account closes.
    """

    def __init__(
        self,
        *,
        source: Source,
        run_group: RunGroup,
        policy: Policy,
        wanted: int,
        group_size: int,
        max_failed_ratio: float = 0.5,
        judge: Judge = keep_all,
        finish: Finish | None = None,
        ledger: Ledger | None = None,
        inflight: InFlight = IN_FLIGHT,
    ) -> None:
        self.ledger = ledger or Ledger()
        self._source = source
        self._run_group = run_group
        self._policy = policy
        self._wanted = wanted
        self._group_size = group_size
        self._max_failed_ratio = max_failed_ratio
        self._judge = judge
        self._finish = finish
        self._inflight = inflight
        self._running: dict[asyncio.Task[list[Rollout]], GroupRun] = {}
        self._finished: deque[GroupRun] = deque()

    async def __aenter__(self) -> Scheduler:
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        await self._leave(Leftover.REQUEUE, error)

    @property
    def in_flight(self) -> int:
        """Rollouts that run, or are finished and not yet judged."""
        return sum(len(run.tickets) for run in (*self._running.values(), *self._finished))

    async def collect(self, step: int) -> Batch:
        """Fill one batch and close it.

        Raises:
            RolloutFailedError: too many rollouts failed, or too many groups were dropped.
            DataError: the data source has no more prompts.
            HookError: a filter broke its contract.
        """
        self.ledger.begin(f"step {step}")
        planned = self._wanted * self._group_size
        batch = Collector(
            step=step,
            wanted=self._wanted,
            judge=self._judge,
            ledger=self.ledger,
            budget=FailureBudget(max_ratio=self._max_failed_ratio, planned=planned, step=step),
        )
        try:
            with self._inflight.track(f"rollout step {step}", f"collecting {self._wanted} groups"):
                await self._fill(batch)
            await self._leave(self._policy.at_close(self._view(len(batch.accepted))))
            if self._finish is not None:
                await self._finish(batch.accepted, batch.seen)
        except BaseException as error:
            self._finished.extend(batch.accepted)
            await self._leave(Leftover.REQUEUE, error)
            raise
        return self._closed(batch)

    async def before_update(self) -> None:
        """Bring what is in flight to where the policy wants it while the weights change."""
        await self._leave(self._policy.at_update(self._view(0)))

    def _view(self, accepted: int) -> View:
        return View(wanted=self._wanted, accepted=accepted, running=len(self._running))

    async def _fill(self, batch: Collector) -> None:
        self._inflight.progress = (0, self._wanted)
        while not self._policy.is_full(self._view(len(batch.accepted))):
            if not self._finished:
                self._admit(batch)
                await self._wait_for_groups(batch)
            run = self._finished[0]
            reason = await batch.drop_reason(run, len(self._running) + len(self._finished) - 1)
            batch.settle(self._finished.popleft(), reason)
            self._inflight.progress = (len(batch.accepted), self._wanted)

    def _admit(self, batch: Collector) -> None:
        count = self._policy.admit(self._view(len(batch.accepted)))
        if count <= 0:
            return
        batch.check_judged()
        for group in self._source.get_samples(count):
            members = with_ids(group)
            run = GroupRun([copy_of(member) for member in members], self.ledger.submit(len(members)))
            task = asyncio.create_task(self._run_group(members, batch.step))
            self._running[task] = run

    async def _wait_for_groups(self, batch: Collector) -> None:
        """Wait until a group finishes. Each rollout has its deadlines, so this wait has one too."""
        if not self._running:
            raise DataError(
                f"the data source has no more prompts: {batch.standing()}", place=f"rollout step {batch.step}"
            )
        waited = list(self._running)[: 1 if self._policy.ordered else None]
        done, _ = await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        for task in [task for task in waited if task in done]:
            run, run.rollouts = self._running[task], task.result()
            self._finished.append(self._running.pop(task))

    async def _leave(self, leftover: Leftover, cause: BaseException | None = None) -> None:
        """Do with everything in flight what `leftover` says; `cause` is the error that ends the step."""
        if leftover is Leftover.KEEP:
            return
        if leftover in (Leftover.REQUEUE, Leftover.RESTART):
            for task in self._running:
                task.cancel()
        if self._running:
            await asyncio.wait(self._running)
        ended = [(task, self._running.pop(task)) for task in list(self._running)]
        all_in_order = [*self._finished, *(run for _, run in ended)]
        errors = [error for task, run in ended if (error := self._harvest(task, run)) is not None]
        back = [run.fresh for _, run in ended if not run.rollouts]
        if leftover is Leftover.RESTART:
            back = [run.fresh for run in all_in_order]
            for run in self._finished:
                run.rollouts = []
        if leftover is Leftover.REQUEUE:
            back += [run.resumable() for run in self._finished]
        if leftover is not Leftover.WAIT:
            for run in self._finished:
                run.settle(self.ledger, Fate.REQUEUED)
            self._finished.clear()
        first = cause or next(iter(errors), None)
        self._give_back(back, first)
        if first is not None and first is not cause:
            raise first

    def _harvest(self, task: asyncio.Task[list[Rollout]], run: GroupRun) -> BaseException | None:
        """Take up an ended task. Returns the task's own error."""
        if task.cancelled() or task.exception() is not None:
            run.settle(self.ledger, Fate.REQUEUED)
            return None if task.cancelled() else task.exception()
        run.rollouts = task.result()
        self._finished.append(run)
        return None

    def _give_back(self, groups: Iterable[MemberGroup], cause: BaseException | None) -> None:
        """Return groups to the source. Where an error ends the step, a refusal does not hide it."""
        try:
            for group in groups:
                self._source.add_samples([group])
        except Exception as refusal:
            if cause is None:
                raise
            cause.add_note(f"the groups in flight could not go back to the data source: {refusal}")
            logger.warning("groups in flight could not go back to the data source: %s", refusal)

    def _closed(self, batch: Collector) -> Batch:
        for run in batch.accepted:
            run.settle_trained(self.ledger)
        self.ledger.check(self.in_flight)
        return Batch(
            groups=sorted(batch.accepted, key=lambda run: run.key),
            seen=batch.seen,
            drops=batch.drops,
            account=self.ledger.step,
        )

"""The one scheduler: takes groups from a data source, runs them, and closes batches as its policy says.

Invariants: every admitted rollout gets exactly one fate in the ledger (law 5); no task outlives the
scheduler; an error of its own work reaches whoever awaits it; groups are taken, dropped or put back whole; no
batch holds a token older than `pacing` allows. Knows groups, outcomes and a runner; nothing of engines,
rewards or training.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from typing import Any, Protocol

from slime.errors import DataError
from slime.rollout.accounting import Account, Ledger
from slime.rollout.collector import Collector, Judge
from slime.rollout.events import NO_LOG, EventLog
from slime.rollout.failures import FailureBudget
from slime.rollout.group_run import GroupRun, began_again, begun_version, copy_of, leaves, with_ids
from slime.rollout.inflight import IN_FLIGHT, InFlight
from slime.rollout.outcome import Member, MemberGroup, Rollout
from slime.rollout.pacing import Pacing, is_late
from slime.rollout.policy import Leftover, Policy, View
from slime.rollout.stopping import GroupStop, Stop

logger = logging.getLogger(__name__)
STOP_SECONDS = 30.0
"""What stopped rollouts get to end with what they have; then they are cancelled."""
OBSERVED = 512
"""So many of the newest durations tell what is late."""


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
        late_percentile: a group that holds up finished work is cut when it runs longer than this share of
            the groups before; 1 never cuts.
    """

    wanted: int
    group_size: int
    max_failed_ratio: float = 0.5
    max_staleness: int | None = None
    late_percentile: float = 1.0


class Scheduler:
    """Collects batches. An async context manager: leaving it ends all that is in flight.

    Args:
        judge: the dynamic filter.
        finish: called with the full batch before its account closes.

    Attributes:
        version: of the weights that a rollout which starts now is sampled by; see `weights_changed`.
    """

    def __init__(
        self,
        *,
        source: Source,
        run_group: RunGroup,
        policy: Policy,
        limits: Limits,
        judge: Judge = keep_all,
        finish: Finish | None = None,
        ledger: Ledger | None = None,
        inflight: InFlight = IN_FLIGHT,
        log: EventLog = NO_LOG,
    ) -> None:
        self.ledger = ledger or Ledger()
        self.version = 0
        self._source = source
        self._run_group = run_group
        self._policy = policy
        self._limits = limits
        self._pacing = Pacing(wanted=limits.wanted, max_staleness=limits.max_staleness)
        self._judge = judge
        self._finish = finish
        self._inflight = inflight
        self._log = log
        self._step = 0
        self._batch: Collector | None = None
        self._running: dict[asyncio.Task[list[Rollout]], GroupRun] = {}
        self._finished: deque[GroupRun] = deque()
        self._cuts: set[asyncio.Task[None]] = set()
        self._between: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._held = False
        self._durations: deque[float] = deque(maxlen=OBSERVED)
        self._log.write(
            "scheduler",
            policy=type(policy).__name__,
            settings=asdict(policy) if is_dataclass(policy) else {},
            limits=asdict(limits),
        )

    async def __aenter__(self) -> Scheduler:
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        try:
            await self._stop_between()
        finally:
            await self._leave(Leftover.REQUEUE, error)

    @property
    def in_flight(self) -> int:
        """Rollouts that run, or are finished and not yet judged."""
        return sum(len(run.tickets) for run in (*self._running.values(), *self._finished))

    def unfinished(self) -> list[MemberGroup]:
        """Copies of all groups that are out, as they would go back now: for a checkpoint."""
        accepted = self._batch.accepted if self._batch is not None else []
        done = [[copy_of(member) for member in run.resumable()] for run in (*accepted, *self._finished)]
        return done + [[copy_of(member) for member in run.fresh] for run in self._running.values()]

    async def collect(self, step: int) -> Batch:
        """Fill one batch and close it.

        Raises:
            RolloutFailedError: too many rollouts failed, or too many groups were dropped.
            DataError: the data source has no more prompts.
            HookError: a filter broke its contract.
        """
        await self._stop_between()
        self._step = step
        self.ledger.begin(f"step {step}")
        self._log.write("collect", step=step)
        batch = self._batch = self._collector(step)
        try:
            with self._inflight.track(f"rollout step {step}", f"collecting {self._limits.wanted} groups"):
                await self._fill(batch)
            await self._leave(self._policy.at_close(self._view()))
            if self._finish is not None:
                await self._finish(batch.accepted, batch.seen)
        except BaseException as error:
            self._finished.extend(batch.accepted)
            batch.accepted = []
            await self._leave(Leftover.REQUEUE, error)
            raise
        return self._closed(batch)

    async def before_update(self) -> None:
        """Bring what is in flight to where the policy wants it while the weights change."""
        leftover = self._policy.at_update(self._view())
        if leftover is Leftover.WAIT:
            self._held = True
            while self._running:
                await asyncio.wait(self._running, return_when=asyncio.FIRST_COMPLETED)
                self._take_up_done(list(self._running))
        else:
            await self._leave(leftover)

    def weights_changed(self, version: int) -> None:
        """The engine samples by these weights from now on."""
        self._log.write("weights", version=version)
        self.version, self._held = version, False
        self._changed.set()

    def _collector(self, step: int) -> Collector:
        limits = self._limits
        planned = limits.wanted * limits.group_size
        return Collector(
            step=step,
            wanted=limits.wanted,
            judge=self._judge,
            ledger=self.ledger,
            budget=FailureBudget(max_ratio=limits.max_failed_ratio, planned=planned, step=step),
        )

    def _view(self) -> View:
        return View(
            wanted=self._limits.wanted,
            accepted=len(self._batch.accepted) if self._batch is not None else 0,
            running=len(self._running),
            finished=len(self._finished),
            room=self._room(self._pacing.due(self.version)),
        )

    def _dues(self) -> tuple[list[int], list[int]]:
        """Due steps of the groups in the batch, and of those out of it."""
        accepted = [run.due for run in self._batch.accepted] if self._batch is not None else []
        return accepted, [run.due for run in (*self._running.values(), *self._finished)]

    def _room(self, due: int) -> int:
        accepted, out = self._dues()
        return self._pacing.room(self._step, due, [*accepted, *out])

    async def _fill(self, batch: Collector) -> None:
        self._inflight.progress = (0, batch.wanted)
        while not self._policy.is_full(self._view()):
            self._log.check()
            run = self._takeable()
            if run is None:
                self._admit()
                await self._wait_for_groups(batch)
                continue
            if self._is_expired(run.oldest_version):
                self._expire(run)
                continue
            reason = await batch.drop_reason(run, len(self._running) + len(self._finished) - 1)
            self._finished.remove(run)
            self._log.write("judge", group=run.key[0], reason=reason)
            batch.settle(run, reason)
            self._inflight.progress = (len(batch.accepted), batch.wanted)

    def _takeable(self) -> GroupRun | None:
        """The next finished group that the batch has a place for; the one that is due first."""
        accepted, out = self._dues()
        for run in sorted(self._finished, key=lambda run: run.due):
            if self._pacing.may_take(self._step, run.due, accepted, out):
                return run
        return None

    def _is_expired(self, version: int) -> bool:
        return self._pacing.due(version) < self._step

    def _expire(self, run: GroupRun) -> None:
        """Let a finished group begin again whose tokens are older than may train: engine or source told so
        only afterwards."""
        self._finished.remove(run)
        self._log.write("expired", group=run.key[0], version=run.oldest_version)
        logger.warning("group %d begins again: its tokens are of version %d", run.key[0], run.oldest_version)
        back = [began_again(member) for member in run.members]
        run.rollouts = []
        run.settle_requeued(self.ledger)
        self._give_back([back], None)

    def _admit(self) -> None:
        count = self._policy.admit(self._view())
        if count <= 0 or self._held:
            return
        if self._batch is not None:
            self._batch.check_judged()
        groups = deque(self._source.get_samples(count))
        try:
            while groups:
                self._start(with_ids(groups[0]))
                groups.popleft()
        except BaseException as error:
            self._give_back(map(list, groups), error)
            raise

    def _start(self, members: MemberGroup) -> None:
        begun = begun_version(members)
        version = self.version if begun is None else min(begun, self.version)
        due = self._pacing.due(version)
        if begun is not None and (due < self._step or self._room(due) < 1):
            members, due = [began_again(member) for member in members], self._pacing.due(self.version)
            version, begun = self.version, None
        run = GroupRun(
            fresh=[copy_of(member) for member in members],
            tickets=self.ledger.submit(len(members)),
            version=version,
            due=due,
            started=self._inflight.clock(),
        )
        rollouts = [leaves(member)[0].rollout_id for member in members]
        self._log.write(
            "start",
            group=run.key[0],
            rollouts=rollouts,
            version=version,
            step=self._step,
            begun=begun is not None,
        )
        task = asyncio.create_task(self._run_group(members, self._step, run.stop))
        self._running[task] = run

    async def _wait_for_groups(self, batch: Collector) -> None:
        """Wait until a group finishes. Each rollout has its deadlines, so this wait has one too."""
        if not self._running and self._view().room > 0 and not self._held:
            raise DataError(
                f"the data source has no more prompts: {batch.standing()}", place=f"rollout step {batch.step}"
            )
        await self._until_something_happens(list(self._running)[: 1 if self._policy.ordered else None])
        self._cut_what_holds_up()

    async def _until_something_happens(self, waited: list[asyncio.Task[list[Rollout]]]) -> None:
        """Wait for one of these groups, or for new weights; take up the groups that are done."""
        changed = asyncio.create_task(self._changed.wait())
        try:
            await asyncio.wait(
                [*waited, changed], return_when=asyncio.FIRST_COMPLETED, timeout=self._look_again()
            )
        finally:
            changed.cancel()
        self._changed.clear()
        self._take_up_done(waited)

    def _take_up_done(self, tasks: Iterable[asyncio.Task[list[Rollout]]]) -> None:
        for task in [task for task in tasks if task in self._running and task.done()]:
            self._take_up(self._running[task], task.result())
            del self._running[task]

    def _look_again(self) -> float | None:
        """Seconds until what holds up finished work may have to be cut."""
        return 1.0 if self._limits.late_percentile < 1 and self._finished and self._running else None

    def _cut_what_holds_up(self) -> None:
        """Cut groups that are late, where finished work waits for them only because of its age."""
        if not self._finished or self._takeable() is not None:
            return
        now, first = self._inflight.clock(), min(run.due for run in self._finished)
        for run in self._running.values():
            late = is_late(now - run.started, self._durations, self._limits.late_percentile)
            if late and run.due < first and run.stop.reason is None:
                self._log.write("cut", group=run.key[0], seconds=now - run.started)
                cut = asyncio.create_task(run.stop.stop(Stop.CUT, STOP_SECONDS))
                self._cuts.add(cut)
                cut.add_done_callback(self._cuts.discard)

    async def _keep_admitting(self) -> None:
        """Start groups as others finish, while no batch is collected."""
        while True:
            self._admit()
            await self._until_something_happens(list(self._running))

    async def _stop_between(self) -> None:
        """End `_keep_admitting`; its error, if it had one, is raised here."""
        task, self._between = self._between, None
        if task is None:
            return
        task.cancel()
        await asyncio.wait({task})
        if not task.cancelled():
            task.result()

    async def _leave(self, leftover: Leftover, cause: BaseException | None = None) -> None:
        """Do with everything in flight what `leftover` says; `cause` is the error that ends the step."""
        if leftover is Leftover.KEEP:
            return
        if leftover is Leftover.CONTINUE:
            await self._stop_running()
        if leftover is not Leftover.WAIT:
            for task in self._running:
                task.cancel()
        if self._running:
            await asyncio.wait(self._running)
        if self._cuts:
            await asyncio.wait(self._cuts)
        ended = [(task, self._running.pop(task)) for task in list(self._running)]
        errors = [error for task, run in ended if (error := self._harvest(task, run)) is not None]
        leaving = [run for _, run in ended if not run.rollouts]
        if leftover is not Leftover.WAIT:
            leaving += self._finished
            self._finished.clear()
        afresh = leftover is Leftover.RESTART
        back = [self._requeued(run, afresh) for run in sorted(leaving, key=_by_start)]
        first = cause or next(iter(errors), None)
        self._give_back(back, first)
        if first is not None and first is not cause:
            raise first

    async def _stop_running(self) -> None:
        """Stop all groups with what they have, and let them end."""
        stops = [run.stop.stop(Stop.CONTINUE, STOP_SECONDS) for run in self._running.values()]
        await asyncio.gather(*stops)
        if self._running:
            await asyncio.wait(self._running, timeout=STOP_SECONDS)

    def _requeued(self, run: GroupRun, afresh: bool) -> MemberGroup:
        """What goes back of a group, accounted for."""
        if afresh:
            run.rollouts = []
        back = run.resumable()
        run.settle_requeued(self.ledger)
        self._log.write("requeue", group=run.key[0], finished=bool(run.rollouts))
        return back

    def _harvest(self, task: asyncio.Task[list[Rollout]], run: GroupRun) -> BaseException | None:
        """Take up an ended task. Returns the task's own error; its group is left without rollouts."""
        run.ended = self._inflight.clock()
        if task.cancelled() or task.exception() is not None:
            return None if task.cancelled() else task.exception()
        self._take_up(run, task.result())
        return None

    def _take_up(self, run: GroupRun, rollouts: list[Rollout]) -> None:
        run.ended, run.rollouts = self._inflight.clock(), rollouts
        self._durations.append(run.ended - run.started)
        self._log.write("finish", group=run.key[0], rollouts=[self._log.rollout(r) for r in rollouts])
        self._finished.append(run)

    def _give_back(self, groups: Iterable[MemberGroup], cause: BaseException | None) -> None:
        """Return groups to the source, each by itself. A refusal is told by group; where an error ends the
        step already, it does not hide that."""
        refusals = [refusal for group in groups if (refusal := self._refusal(group)) is not None]
        if not refusals:
            return
        if cause is None:
            raise refusals[0]
        cause.add_note(f"the groups in flight could not go back to the data source: {refusals[0]}")

    def _refusal(self, group: MemberGroup) -> Exception | None:
        """What the source raises when it should take this group, named in the log."""
        try:
            self._source.add_samples([group])
        except Exception as refusal:  # noqa: BLE001 - raised by the caller, when the others have gone back
            ids = [leaves(member)[0].rollout_id for member in group]
            number = leaves(group[0])[0].group_index
            logger.error("group %s, rollouts %s, cannot go back to the data source: %s", number, ids, refusal)
            return refusal
        return None

    def _closed(self, batch: Collector) -> Batch:
        for run in batch.accepted:
            run.settle_trained(self.ledger)
        self.ledger.check(self.in_flight)
        groups = sorted(batch.accepted, key=lambda run: run.key)
        self._log.write("close", step=batch.step, groups=[run.key[0] for run in groups])
        self._batch, self._step = None, batch.step + 1
        if self._policy.continuous:
            self._between = asyncio.create_task(self._keep_admitting())
        return Batch(
            step=batch.step,
            groups=groups,
            seen=batch.seen,
            drops=batch.drops,
            account=self.ledger.step,
            age=max((batch.step - run.oldest_version for run in groups), default=0),
        )


def _by_start(run: GroupRun) -> int:
    return run.tickets[0]

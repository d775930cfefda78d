"""The one scheduler: takes groups from a data source, runs them, and closes batches as its policy says.

Invariants: every admitted rollout gets exactly one fate in the ledger (law 5); no task outlives the
scheduler; an error of its own work reaches whoever awaits it; groups are taken, dropped or put back whole; no
batch holds a token older than `pacing` allows. Knows groups, outcomes and a runner; nothing of engines,
rewards or training.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from dataclasses import asdict, is_dataclass

from slime.errors import DataError, DeadlineError
from slime.rollout.accounting import Ledger
from slime.rollout.collector import Collector, Judge
from slime.rollout.events import NO_LOG, EventLog
from slime.rollout.failures import FailureBudget
from slime.rollout.flight import Flight
from slime.rollout.group_run import GroupRun, begun_version, copy_of, leaves, with_ids
from slime.rollout.group_source import Source, give_back
from slime.rollout.inflight import IN_FLIGHT, InFlight
from slime.rollout.origin import origin_of, without_origin
from slime.rollout.outcome import MemberGroup
from slime.rollout.pacing import Pacing
from slime.rollout.policy import Leftover, Policy, View
from slime.rollout.scheduling import Batch, Finish, Limits, RunGroup, keep_all

logger = logging.getLogger(__name__)
LOOK_SECONDS = 1.0
"""How often groups that hold up finished work are looked at."""


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
        self._flight = Flight(inflight.clock, log)
        self._between: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._held = False
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
        return sum(len(run.tickets) for run in self._flight)

    def unfinished(self) -> list[MemberGroup]:
        """Copies of all groups that are out, as they would go back now: for a checkpoint."""
        accepted = self._batch.accepted if self._batch is not None else []
        return [[copy_of(member) for member in run.resumable()] for run in (*accepted, *self._flight)]

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
            self._flight.finished.extend(batch.accepted)
            batch.accepted = []
            await self._leave(Leftover.REQUEUE, error)
            raise
        return self._closed(batch)

    async def before_update(self) -> None:
        """Bring what is in flight to where the policy wants it while the weights change.

        What ends meanwhile is taken up by whoever collects, now or next, and so are errors: a batch that is
        full trains before they end the run.
        """
        leftover = self._policy.at_update(self._view())
        if leftover is Leftover.WAIT:
            self.hold()
            if self._flight.running:
                await asyncio.wait(self._flight.running)
        else:
            await self._leave(leftover)

    def hold(self) -> None:
        """Start nothing more before the weights change."""
        self._log.write("hold")
        self._held = True

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
            running=len(self._flight.running),
            finished=len(self._flight.finished),
            room=self._room(self._pacing.due(self.version)),
        )

    def _dues(self) -> tuple[list[int], list[int]]:
        """Due steps of the groups in the batch, and of those out of it."""
        accepted = [run.due for run in self._batch.accepted] if self._batch is not None else []
        return accepted, [run.due for run in self._flight]

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
            if run.is_cut_empty:
                self._flight.finished.remove(run)
                give_back(self._source, [self._requeued(run, afresh=False)], None)
                continue
            reason = await batch.drop_reason(run, len(list(self._flight)) - 1)
            self._flight.finished.remove(run)
            self._log.write("judge", group=run.key[0], reason=reason)
            batch.settle(run, reason)
            self._inflight.progress = (len(batch.accepted), batch.wanted)

    def _takeable(self) -> GroupRun | None:
        """The next finished group that the batch has a place for; the one that is due first."""
        accepted, out = self._dues()
        for run in sorted(self._flight.finished, key=lambda run: run.due):
            if self._pacing.may_take(self._step, run.due, accepted, out):
                return run
        return None

    def _is_expired(self, version: int) -> bool:
        return self._pacing.due(version) < self._step

    def _expire(self, run: GroupRun) -> None:
        """Let a finished group begin again whose tokens are older than may train, as the engine told only
        afterwards."""
        self._flight.finished.remove(run)
        self._log.write("expired", group=run.key[0], version=run.oldest_version)
        logger.warning("group %d begins again: it has tokens of version %d", run.key[0], run.oldest_version)
        run.rollouts = []
        run.settle_requeued(self.ledger)
        give_back(self._source, [run.from_the_start()], None)

    def _admit(self) -> None:
        count = self._policy.admit(self._view())
        if count <= 0 or self._held:
            return
        if self._batch is not None:
            self._batch.check_judged()
        with self._inflight.track("data source", f"giving {count} groups", self._limits.wait_seconds):
            groups = deque(self._source.get_samples(count))
        try:
            while groups:
                self._start(with_ids(groups[0]))
                groups.popleft()
        except BaseException as error:
            give_back(self._source, map(list, groups), error)
            raise

    def _start(self, members: MemberGroup) -> None:
        begun = begun_version(members)
        version = self.version if begun is None else min(begun, self.version)
        due = self._pacing.due(version)
        if begun is not None and (due < self._step or self._room(due) < 1):
            number = leaves(members[0])[0].group_index
            self._log.write("expired", group=number, version=version)
            logger.warning("group %s begins again: it has tokens of version %d", number, version)
            members, due = [origin_of(member) for member in members], self._pacing.due(self.version)
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
        running = [without_origin(member) for member in members]
        self._flight.start(run, self._run_group(running, self._step, run.stop))

    async def _wait_for_groups(self, batch: Collector) -> None:
        """Wait until a group finishes. Each rollout has its deadlines, so this wait has one too."""
        if not self._flight.running and self._view().room > 0 and not self._held:
            raise DataError(
                f"the data source has no more prompts: {batch.standing()}", place=f"rollout step {batch.step}"
            )
        if not self._flight.running:
            await self._wait_for_weights(batch)
            return
        await self._until_something_happens()
        if self._flight.finished and self._takeable() is None:
            self._flight.cut_late(self._limits.late_percentile)

    async def _wait_for_weights(self, batch: Collector) -> None:
        """Nothing may start before newer weights come."""
        seconds, phase = self._limits.wait_seconds, f"waiting for weights newer than version {self.version}"
        with self._inflight.track(f"rollout step {batch.step}", phase, seconds):
            try:
                async with asyncio.timeout(seconds):
                    await self._changed.wait()
            except TimeoutError as error:
                raise DeadlineError(
                    f"no weights newer than version {self.version} came within {seconds:g} s",
                    place=f"rollout step {batch.step}",
                    remedy="tell slime.rollout.session.SESSION.weights_changed after each update",
                ) from error
        self._changed.clear()

    async def _until_something_happens(self) -> None:
        """Wait for a group, or for new weights; or until what holds up finished work may have to be cut."""
        flight, cuts = self._flight, self._limits.late_percentile < 1
        seconds = LOOK_SECONDS if cuts and flight.finished and flight.running else None
        await flight.wait(oldest_only=self._policy.ordered, changed=self._changed, seconds=seconds)

    async def _keep_admitting(self) -> None:
        """Start groups as others finish, while no batch is collected."""
        while True:
            self._admit()
            await self._until_something_happens()

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
            await self._flight.stop()
        if leftover is not Leftover.WAIT:
            self._flight.cancel()
        leaving, errors = await self._flight.land()
        if leftover is not Leftover.WAIT:
            leaving += self._flight.finished
            self._flight.finished.clear()
        afresh = leftover is Leftover.RESTART
        back = [self._requeued(run, afresh) for run in sorted(leaving, key=_by_start)]
        first = cause or next(iter(errors), None)
        give_back(self._source, back, first)
        if first is not None and first is not cause:
            raise first

    def _requeued(self, run: GroupRun, afresh: bool) -> MemberGroup:
        """What goes back of a group, accounted for."""
        if afresh:
            run.rollouts = []
        back = run.resumable()
        run.settle_requeued(self.ledger)
        self._log.write("requeue", group=run.key[0], finished=bool(run.rollouts))
        return back

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
            account=self.ledger.close(),
            age=max((batch.step - run.oldest_version for run in groups), default=0),
        )


def _by_start(run: GroupRun) -> int:
    return run.tickets[0]

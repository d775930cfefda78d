"""The groups that are out: those that run, and those that are finished and in no batch.

Invariant: each is in exactly one of the two until it is taken or lands; an ended task is taken up once, and
its error reaches whoever takes it up. Knows tasks and time; no policy, batch or data source.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Iterator
from typing import Any

from slime.rollout.events import EventLog
from slime.rollout.group_run import GroupRun
from slime.rollout.outcome import Rollout
from slime.rollout.pacing import late_after
from slime.rollout.stopping import Stop

STOP_SECONDS = 30.0
"""What stopped rollouts get to end with what they have; then they are cancelled."""
OBSERVED = 512
"""So many of the newest durations tell what is late."""


class Flight:
    """What is out of one scheduler.

    Attributes:
        running: by task, in the order of their start.
        finished: in the order of their end.
    """

    def __init__(self, clock: Callable[[], float], log: EventLog) -> None:
        self.running: dict[asyncio.Task[list[Rollout]], GroupRun] = {}
        self.finished: deque[GroupRun] = deque()
        self._clock = clock
        self._log = log
        self._cuts: set[asyncio.Task[None]] = set()
        self._durations: deque[float] = deque(maxlen=OBSERVED)

    def __iter__(self) -> Iterator[GroupRun]:
        return iter([*self.running.values(), *self.finished])

    def start(self, run: GroupRun, work: Coroutine[Any, Any, list[Rollout]]) -> None:
        """Let a group run."""
        self.running[asyncio.create_task(work)] = run

    def take_up(self, tasks: Iterable[asyncio.Task[list[Rollout]]]) -> None:
        """Count those of these tasks that are done as finished; raises the error of one that failed."""
        moment = self._log.now()
        for task in [task for task in tasks if task in self.running and task.done()]:
            self._finish(self.running[task], task.result(), moment)
            del self.running[task]

    async def wait(self, *, oldest_only: bool, changed: asyncio.Event, seconds: float | None) -> None:
        """Wait until a group ends, or the oldest one, or `changed` is set, and take up what is done."""
        waited = list(self.running)[: 1 if oldest_only else None]
        news = asyncio.create_task(changed.wait())
        try:
            await asyncio.wait([*waited, news], return_when=asyncio.FIRST_COMPLETED, timeout=seconds)
        finally:
            news.cancel()
        changed.clear()
        self.take_up(waited)

    def cut_late(self, percentile: float) -> None:
        """Cut groups that run longer than this share of those before, and are due before any finished one."""
        limit = late_after(self._durations, percentile)
        now, first = self._clock(), min(run.due for run in self.finished)
        for run in self.running.values():
            if now - run.started > limit and run.due < first and run.stop.reason is None:
                self._log.write("cut", group=run.key[0], seconds=now - run.started)
                cut = asyncio.create_task(run.stop.stop(Stop.CUT, STOP_SECONDS))
                self._cuts.add(cut)
                cut.add_done_callback(self._cuts.discard)

    async def stop(self) -> None:
        """Stop what runs with what it has, and let it end."""
        stops = [run.stop.stop(Stop.CONTINUE, STOP_SECONDS) for run in self.running.values()]
        await asyncio.gather(*stops)
        if self.running:
            await asyncio.wait(self.running, timeout=STOP_SECONDS)

    def cancel(self) -> None:
        """Cancel what runs."""
        for task in self.running:
            task.cancel()

    async def land(self) -> tuple[list[GroupRun], list[BaseException]]:
        """Wait until nothing runs. Returns the groups that ended without rollouts, and the errors."""
        for tasks in (self.running, self._cuts):
            if tasks:
                await asyncio.wait(tasks)
        lost, errors, moment = [], [], self._log.now()
        for task in list(self.running):
            run = self.running.pop(task)
            run.ended = self._clock()
            if task.cancelled():
                lost.append(run)
            elif (error := task.exception()) is not None:
                lost.append(run)
                errors.append(error)
            else:
                self._finish(run, task.result(), moment)
        return lost, errors

    def _finish(self, run: GroupRun, rollouts: list[Rollout], moment: float) -> None:
        """Count a group as finished; those that are taken up together have one moment in the log, so that a
        replay takes them up together too."""
        run.ended, run.rollouts = self._clock(), rollouts
        self._durations.append(run.ended - run.started)
        told = [self._log.rollout(rollout) for rollout in rollouts]
        self._log.write("finish", moment, group=run.key[0], rollouts=told)
        self.finished.append(run)

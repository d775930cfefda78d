"""Health of engines: whether each generates, whether its process answers, and how often it may be replaced.

Invariant: a paused engine is not dead: while paused only its process is asked, and an answer to a question
from before a pause or its end counts for nothing. A failure is told once, and never raised into the run.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from slime.errors import EngineError
from slime.rollout.loop import BackgroundLoop
from slime.serving.endpoint import EngineEndpoint
from slime.utils.engine_client import EngineClient

logger = logging.getLogger(__name__)
Question: TypeAlias = Literal["generates", "answers"]
Ask: TypeAlias = Callable[[EngineEndpoint, Question, float], Awaitable[str | None]]
"""Puts a question to an engine, with the seconds it has; returns what is wrong, None if nothing is."""


@dataclass(frozen=True, kw_only=True)
class HealthTimes:
    """Seconds.

    Attributes:
        interval: between two checks of an engine.
        timeout: of one check.
        first_wait: without checks of generation after a start or a pause.
    """

    interval: float = 30.0
    timeout: float = 30.0
    first_wait: float = 0.0


@dataclass(frozen=True, kw_only=True)
class HealthFailure:
    """An engine that does not work.

    Attributes:
        reason: the last answer, or what came instead of one.
        log: the end of the engine's log, where it is known.
    """

    engine: str
    question: Question
    reason: str
    log: str = ""

    def __str__(self) -> str:
        what = "generates no token" if self.question == "generates" else "does not answer"
        text = f"engine {self.engine} {what}: {self.reason}"
        return f"{text}\n  its log ends:\n{self.log}" if self.log else text


class CheckSchedule:
    """When an engine is asked what; times are those of the caller's clock."""

    def __init__(self, times: HealthTimes, now: float, *, paused: bool) -> None:
        self._times = times
        self._since = now
        self._asked: float | None = None
        self.paused = paused
        self.epoch = 0
        """Changes with each pause and resume; an answer of an older epoch is void."""

    def turn(self, now: float, *, paused: bool) -> None:
        """Generation is paused, or goes on."""
        self.paused, self._since, self._asked = paused, now, None
        self.epoch += 1

    def asked(self, now: float) -> None:
        """A check was made."""
        self._asked = now

    def next_check(self) -> tuple[float, Question]:
        """When the next check is due, and what it asks."""
        interval = self._times.interval
        if self.paused:
            return (self._since if self._asked is None else self._asked) + interval, "answers"
        return (self._since + self._times.first_wait if self._asked is None else self._asked + interval), (
            "generates"
        )


class HealthWatch:
    """Asks engines on the running event loop; not thread-safe.

    Args:
        on_failure: gets each failure once; the engine is not asked again until it is watched anew.
        log_tail: the end of an engine's log, by its name.
    """

    def __init__(
        self,
        ask: Ask,
        on_failure: Callable[[HealthFailure], None],
        times: HealthTimes,
        log_tail: Callable[[str], str] | None = None,
    ) -> None:
        self._ask, self._on_failure, self._times = ask, on_failure, times
        self._log_tail = log_tail or (lambda name: "")
        self._paused = True
        self._watched: dict[str, tuple[CheckSchedule, asyncio.Event, asyncio.Task[None]]] = {}

    def watch(self, endpoint: EngineEndpoint) -> None:
        """Ask this engine from now on, in place of one of its name."""
        self.forget(endpoint.name)
        now = asyncio.get_running_loop().time()
        schedule, changed = CheckSchedule(self._times, now, paused=self._paused), asyncio.Event()
        task = asyncio.create_task(self._watch(endpoint, schedule, changed))
        self._watched[endpoint.name] = (schedule, changed, task)

    def forget(self, name: str) -> None:
        """Do not ask this engine any more."""
        if name in self._watched:
            self._watched.pop(name)[2].cancel()

    def turn(self, *, paused: bool) -> None:
        """Generation of all engines is paused, or goes on."""
        self._paused = paused
        now = asyncio.get_running_loop().time()
        for schedule, changed, _ in self._watched.values():
            schedule.turn(now, paused=paused)
            changed.set()

    async def close(self) -> None:
        """Ask nobody any more; returns when nobody is asked."""
        tasks = [task for _, _, task in self._watched.values()]
        for name in list(self._watched):
            self.forget(name)
        if tasks:
            await asyncio.wait(tasks)

    async def _watch(self, endpoint: EngineEndpoint, schedule: CheckSchedule, changed: asyncio.Event) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            due, question = schedule.next_check()
            if await _changes_before(changed, due - clock()):
                continue
            epoch = schedule.epoch
            try:
                reason = await self._ask(endpoint, question, self._times.timeout)
            except Exception as error:  # noqa: BLE001 - worker boundary: a check that breaks has failed
                reason = f"the check broke: {type(error).__name__}: {error}"
            if epoch != schedule.epoch:
                continue
            schedule.asked(clock())
            if reason is not None:
                self._report(endpoint.name, question, reason)
                return

    def _report(self, name: str, question: Question, reason: str) -> None:
        failure = HealthFailure(engine=name, question=question, reason=reason, log=self._tail(name))
        try:
            self._on_failure(failure)
        except Exception:  # the worker loop's boundary: whoever is told must not end the watch
            logger.exception("engine %s: %s; and telling so failed", name, reason)

    def _tail(self, name: str) -> str:
        try:
            return self._log_tail(name)
        except Exception as error:  # noqa: BLE001 - worker boundary: a failure is told without its log, too
            return f"    (not to be had: {error})"


async def _changes_before(changed: asyncio.Event, seconds: float) -> bool:
    """Wait until a time; True at once if something changes before."""
    changed.clear()
    try:
        async with asyncio.timeout(max(seconds, 0.0)):
            await changed.wait()
    except TimeoutError:
        return False
    return True


async def ask_engine(endpoint: EngineEndpoint, question: Question, seconds: float) -> str | None:
    """Ask over HTTP. That a process answers at all, be it with an error, is all that "answers" asks."""
    client = EngineClient(endpoint.url, retries=0)
    return await (
        client.why_not_generating(seconds) if question == "generates" else client.why_silent(seconds)
    )


class HealthMonitor:
    """A thread that watches engines; it starts paused.

    Args:
        endpoints: those of the start; more by `watch`.
        on_failure: called on the thread.
        log_tail: the end of an engine's log, by its name; called on the thread.
    """

    def __init__(
        self,
        endpoints: Iterable[EngineEndpoint],
        on_failure: Callable[[HealthFailure], None],
        times: HealthTimes | None = None,
        *,
        log_tail: Callable[[str], str] | None = None,
        ask: Ask = ask_engine,
    ) -> None:
        self._loop = BackgroundLoop("slime-health")
        self._watch = HealthWatch(ask, on_failure, times or HealthTimes(), log_tail)
        self._stopped = False
        for endpoint in endpoints:
            self.watch(endpoint)

    def watch(self, endpoint: EngineEndpoint) -> None:
        """Watch an engine, in place of one of its name."""
        self._call(lambda: self._watch.watch(endpoint))

    def forget(self, name: str) -> None:
        """Do not watch an engine any more: it is about to be stopped on purpose."""
        self._call(lambda: self._watch.forget(name))

    def pause(self) -> None:
        """Generation is about to be paused: ask only whether processes answer."""
        self._call(lambda: self._watch.turn(paused=True))

    def resume(self) -> None:
        """Generation goes on."""
        self._call(lambda: self._watch.turn(paused=False))

    def stop(self) -> None:
        """End the thread; nothing is told from then on. Further calls do nothing."""
        if not self._stopped:
            self._stopped = True
            self._loop.run(self._watch.close())
            self._loop.stop()

    def _call(self, action: Callable[[], None]) -> None:
        """Run on the loop, and wait for it: after `pause` no older answer counts."""
        if self._stopped:
            return
        if threading.current_thread() is self._loop.thread:  # `on_failure` may call back
            action()
            return

        async def act() -> None:
            action()

        self._loop.run(act())


class RestartBudget:
    """How often each engine may be replaced.

    Args:
        limit: ``--rollout-engine-restarts``.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._reasons: dict[str, list[str]] = {}

    def take(self, engine: str, reason: str) -> int:
        """One replacement of an engine that failed for a reason; returns how many are left.

        Raises:
            EngineError: none was left; with every reason.
        """
        reasons = self._reasons.setdefault(engine, [])
        reasons.append(reason)
        if len(reasons) > self._limit:
            listed = "\n".join(f"  {number}. {text}" for number, text in enumerate(reasons, start=1))
            raise EngineError(
                f"failed {len(reasons)} times, and may be replaced {self._limit} times:\n{listed}",
                place=f"engine {engine}",
                remedy="mend what ends it; --rollout-engine-restarts raises the bound",
            )
        return self._limit - len(reasons)

    @property
    def used(self) -> int:
        """Replacements so far, of all engines."""
        return sum(min(len(reasons), self._limit) for reasons in self._reasons.values())

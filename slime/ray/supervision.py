"""Waiting for actors: every wait has a name and a deadline, and ends at once when an actor dies.

Invariant: a failure surfaces as a `SlimeError` with its cause; none is lost because nobody waited for it.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

from slime.errors import ActorDiedError, DeadlineError, EngineError, RankLostError, SlimeError
from slime.rollout.inflight import IN_FLIGHT


class StopRequested(Exception):  # noqa: N818 - a request, not an error
    """The user asked the run to stop, and the phase that runs can be given up."""


class StopFlag:
    """First SIGINT or SIGTERM asks for a clean stop; a second SIGINT interrupts at once."""

    def __init__(self) -> None:
        self.requested = False

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.requested = True

    @contextmanager
    def installed(self) -> Iterator[StopFlag]:
        """Handle the signals inside the block."""
        before = {
            number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)
        }
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


GRACE_SECONDS = 5.0
"""What the others of a group get to fail too, so that the one that began it is found."""


DEATH_SECONDS = 3.0
"""What the death of a process may take to be known, when an engine or a call fails by it."""


class Supervisor:
    """Waits for results while it watches every actor of the run.

    Args:
        stop: the flag that gives up phases which can be given up.
        poll: seconds between looks at the flag and calls of `on_tick`.
    """

    def __init__(self, stop: StopFlag, poll: float = 0.25) -> None:
        self._stop = stop
        self._poll = poll
        self._watches: dict[Any, str] = {}
        self._looks: list[Callable[[], None]] = []

    def watch(self, name: str, reference: Any) -> None:
        """Treat the end of `reference` (a call that lasts as long as its actor) as the death of `name`."""
        self._watches[reference] = name

    def look(self, at: Callable[[], None]) -> None:
        """Call `at` again and again during every wait; what it raises ends the wait."""
        self._looks.append(at)

    def unwatch_all(self) -> None:
        """Stop watching: the actors are about to be stopped on purpose."""
        self._watches.clear()
        self._looks.clear()

    def raise_if_dead(self, seconds: float) -> None:
        """Give a death that explains a failure a moment to show.

        Raises:
            ActorDiedError: a watched actor ended within `seconds`.
        """
        import ray

        if self._watches:
            done, _ = ray.wait([*self._watches], num_returns=1, timeout=seconds)
            for reference in done:
                self._report_death(reference)

    def wait(self, name: str, reference: Any, deadline: float, **options: Any) -> Any:
        """The result of `reference`; see `wait_all`."""
        return self.wait_all(name, {"": reference}, deadline, **options)[0]

    def wait_all(
        self,
        name: str,
        references: Mapping[str, Any],
        deadline: float,
        *,
        can_give_up: bool = False,
        on_tick: Callable[[], None] | None = None,
        flag: str = "--phase-timeout",
    ) -> list[Any]:
        """The results of one call of several processes that work together, by their order.

        Args:
            references: by the name of the process.
            flag: that sets the deadline.

        Raises:
            SlimeError: the call's own error, of the process that began it, or ActorDiedError when a watched
                actor ends.
            DeadlineError: not done after `deadline` seconds.
            StopRequested: a stop was requested and `can_give_up`.
        """
        with IN_FLIGHT.track(f"waiting for {name}", ", ".join(references) or "one process", deadline):
            return self._wait_all(name, references, deadline, can_give_up, on_tick, flag)

    def _wait_all(
        self,
        name: str,
        references: Mapping[str, Any],
        deadline: float,
        can_give_up: bool,
        on_tick: Callable[[], None] | None,
        flag: str,
    ) -> list[Any]:
        import ray

        started = time.monotonic()
        pending = {reference: process for process, reference in references.items()}
        results: dict[str, Any] = {}
        while pending:
            done, _ = ray.wait([*pending, *self._watches], num_returns=1, timeout=self._poll)
            for reference in done:
                if reference not in pending:
                    self._report_death(reference)
                process = pending.pop(reference)
                results[process] = self._result_or_cause(name, process, reference, pending)
            if not pending:
                break
            if can_give_up and self._stop.requested:
                raise StopRequested(name)
            if time.monotonic() - started > deadline:
                raise DeadlineError(
                    f"{name} is not done after {deadline:g} s",
                    remedy=f"raise {flag}, or see the logs",
                )
            for look in self._looks:
                look()
            if on_tick is not None:
                on_tick()
        return [results[process] for process in references]

    def _result_or_cause(self, name: str, process: str, reference: Any, pending: dict[Any, str]) -> Any:
        try:
            return result_of(_named(name, process), reference)
        except SlimeError as error:
            if isinstance(error, EngineError | ActorDiedError):
                self.raise_if_dead(DEATH_SECONDS)
            raise self._cause(name, {process: error}, pending) from None

    def _cause(self, name: str, failures: dict[str, SlimeError], pending: dict[Any, str]) -> SlimeError:
        """The failure that made the others fail, of processes that wait for each other.

        A process that lost contact with another is not the cause: it is the one that died, that failed of
        itself, or that has not come to where the others gave up waiting for it.
        """
        import ray

        until = time.monotonic() + GRACE_SECONDS
        while pending and time.monotonic() < until:
            done, _ = ray.wait([*pending, *self._watches], num_returns=1, timeout=self._poll)
            for reference in done:
                if reference not in pending:
                    self._report_death(reference)
                process = pending.pop(reference)
                try:
                    result_of(_named(name, process), reference)
                except SlimeError as error:
                    failures[process] = error
        causes = [failure for failure in failures.values() if not isinstance(failure, RankLostError)]
        if causes:
            return causes[0]
        first = next(iter(failures.values()))
        if not pending:
            return first
        return ActorDiedError(
            f"did not come to where the others waited for it during {name}; they gave up: {first.message}",
            place=", ".join(pending.values()),
            remedy=first.remedy,
        )

    def _report_death(self, reference: Any) -> None:
        name = self._watches[reference]
        how = result_of(name, reference)
        raise ActorDiedError(str(how), place=name)


def _named(name: str, process: str) -> str:
    return f"{name}, {process}" if process else name


def result_of(name: str, reference: Any) -> Any:
    """`ray.get` whose errors are ours, with the remote cause."""
    import ray
    from ray.exceptions import RayActorError, RayTaskError

    try:
        return ray.get(reference)
    except RayTaskError as error:
        cause = error.cause
        if isinstance(cause, SlimeError):
            raise cause from None
        raise ActorDiedError(f"failed: {error}", place=name) from None
    except RayActorError as error:
        raise ActorDiedError(f"its process died: {error}", place=name) from None

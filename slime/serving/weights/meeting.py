"""Two sides of one collective: what runs in this process, and the calls that make engines take part.

Invariant: `together` returns when all have ended or the deadline has passed, and tells engines that are gone
from engines that only tell of it. Knows futures and HTTP failures; knows no group.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import TypeVar

from slime.errors import DeadlineError, EngineUnavailableError
from slime.serving.weights.crew import Calls, Crew

T = TypeVar("T")
SETTLE_SECONDS = 15.0
"""How long engines get to tell of a failed collective once this side has left it."""


def together(crew: Crew, own: Future[T], calls: Calls, leave: Callable[[], None]) -> T | None:
    """The result of `own` once all calls have succeeded too; else None, and whoever is to blame is out.

    Args:
        own: this side of the collective.
        leave: makes the collective fail for whoever still waits in it.
    """
    wait([own, *calls.futures.values()], crew.deadline.left / 2, return_when=FIRST_EXCEPTION)
    if own.done() and own.exception() is None and all(_succeeded(f) for f in calls.futures.values()):
        return own.result()
    leave()
    wait([own, *calls.futures.values()], min(SETTLE_SECONDS, crew.deadline.left / 2))
    _blame(crew, own, calls)
    return None


def in_thread(work: Callable[[], T], name: str) -> Future[T]:
    """Run `work` on a thread that does not keep the process alive."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except Exception as error:  # noqa: BLE001 - worker boundary: whoever waits is told
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


def _blame(crew: Crew, own: Future[T], calls: Calls) -> None:
    """Drop engines that are gone or silent; where none is, those that refused; where none did, all."""
    gone, refused = {}, {}
    for engine, future in calls.futures.items():
        error = future.exception() if future.done() else None
        if not future.done() or isinstance(error, EngineUnavailableError | DeadlineError):
            gone[engine] = "did not answer" if error is None else str(error)
        elif error is not None:
            refused[engine] = str(error)
    cause = own.exception() if own.done() else None
    whole = f"{cause or 'the deadline has passed'}"
    for engine, reason in (gone or refused or dict.fromkeys(calls.futures, whole)).items():
        crew.drop(engine, f"{calls.step}: {reason}")


def _succeeded(future: Future[object]) -> bool:
    return future.done() and future.exception() is None

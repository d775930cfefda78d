"""The process-wide event loops, above all that of rollouts: a daemon thread each, started at first use.

Invariant: engine sessions and semaphores belong to this loop, so that they outlive one rollout step.
Synchronous callers (Ray actors, scripts) enter it through `run_blocking`; knows nothing of what runs in it.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from slime.errors import SlimeError

T = TypeVar("T")
ROLLOUTS = "slime-rollout"
CANCEL_SECONDS = 15.0
"""How long an interrupted caller waits for the coroutine to clean up (engine aborts, requeues)."""


class BackgroundLoop:
    """An event loop in a thread of its own."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._running: dict[concurrent.futures.Future[Any], asyncio.Task[Any]] = {}
        self.thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self.thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` to its end and return its value; an interrupt of the caller cancels it first.

        Raises:
            SlimeError: called from the loop itself, which would wait for ever.
        """
        if threading.current_thread() is self.thread:
            work.close()
            raise SlimeError(
                "run_blocking was called inside the rollout event loop", remedy="await the coroutine instead"
            )
        outcome: concurrent.futures.Future[T] = concurrent.futures.Future()

        def start() -> None:
            task = self.loop.create_task(work)
            self._running[outcome] = task
            task.add_done_callback(lambda task: _copy(task, outcome))

        self.loop.call_soon_threadsafe(start)
        try:
            return outcome.result()
        finally:
            if not outcome.done():  # the caller is interrupted
                self.loop.call_soon_threadsafe(self._cancel, outcome)
                concurrent.futures.wait([outcome], timeout=CANCEL_SECONDS)
            self._running.pop(outcome, None)

    def _cancel(self, outcome: concurrent.futures.Future[Any]) -> None:
        task = self._running.get(outcome)
        if task is not None:  # else it has ended meanwhile
            task.cancel()

    def cancel(self) -> None:
        """Cancel what other threads run here and wait for its end, so that hooks in flight clean up."""
        running = dict(self._running)
        for task in running.values():
            self.loop.call_soon_threadsafe(task.cancel)
        concurrent.futures.wait(list(running), timeout=CANCEL_SECONDS)

    def stop(self) -> None:
        """End the loop, what is suspended in it, and its thread; tasks that still run are dropped."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()

    def _serve(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        self.loop.close()


_lock = threading.Lock()
_shared: dict[str, BackgroundLoop] = {}


def background_loop(name: str = ROLLOUTS) -> BackgroundLoop:
    """The one loop of this name in this process (a forked child gets its own)."""
    with _lock:
        if name not in _shared or not _shared[name].thread.is_alive():
            _shared[name] = BackgroundLoop(name)
            atexit.register(_shared[name].stop)
        return _shared[name]


def run_blocking(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on the rollout loop and wait for its value.

    Raises:
        SlimeError: called from the loop itself.
    """
    return background_loop().run(work)


def _copy(task: asyncio.Task[T], outcome: concurrent.futures.Future[T]) -> None:
    if task.cancelled():
        outcome.set_exception(asyncio.CancelledError())
    elif (error := task.exception()) is not None:
        outcome.set_exception(error)
    else:
        outcome.set_result(task.result())

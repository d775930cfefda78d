"""An event loop whose clock jumps: sleeping costs nothing, and a run of days is played in seconds.

Invariant: what runs sees the same order and the same times as on a real loop whose code takes no time. For
code that only sleeps and waits: nothing outside of the loop can wake it.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

from slime.errors import SlimeError

T = TypeVar("T")


class _JumpingSelector(selectors.SelectSelector):
    """Advances the clock instead of waiting."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if ready or timeout == 0:
            return ready
        if timeout is None:
            raise SlimeError("nothing is left that could happen: everything waits for something else")
        self.now += timeout
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """The loop; its `time` begins at 0."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        """Seconds that were slept."""
        return self._jumping.now


def run_virtually(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end on a loop of its own; it reads the time from the running loop.

    Raises:
        SlimeError: it waits for something that cannot happen.
    """
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)

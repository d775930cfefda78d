"""Warm boxes: made ahead of need, used once.

Invariant: a box that was taken never comes back, and one that is handed out answers. A box that cannot be
made raises where one is taken.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Generic, Self, TypeVar

from slime.agent.sandbox.base import Sandbox, SandboxClosedError, SandboxError

Box = TypeVar("Box", bound=Sandbox)


class SandboxPool(Generic[Box]):
    """Keeps `size` boxes of a factory warm. Entered, it fills; left, it closes what was not used."""

    def __init__(self, factory: Callable[[], Box], size: int) -> None:
        if size < 1:
            raise SandboxError(f"a pool of {size} boxes keeps nothing warm", remedy="size >= 1")
        self.factory = factory
        self.size = size
        self._warm: deque[asyncio.Task[Box]] = deque()
        self._open = False

    async def __aenter__(self) -> Self:
        self._open = True
        self._fill()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open = False
        unused = [await _settled(task) for task in self._warm]
        self._warm.clear()
        await asyncio.gather(*(box.__aexit__(None, None, None) for box in unused if box is not None))

    def _fill(self) -> None:
        while len(self._warm) < self.size:
            self._warm.append(asyncio.create_task(self.factory().__aenter__()))

    @asynccontextmanager
    async def take(self) -> AsyncIterator[Box]:
        """A box that nobody used before; closed at the end of the block, while another is made in its place.

        Raises:
            SandboxError: the pool is not entered, or the box could not be made.
        """
        box = await self._next()
        try:
            yield box
        finally:
            await box.__aexit__(None, None, None)

    async def _next(self) -> Box:
        """The oldest warm box that still lives."""
        while self._open:
            task = self._warm.popleft()
            self._fill()
            try:
                box = await asyncio.shield(task)
            except asyncio.CancelledError:
                self._warm.appendleft(task)
                raise
            try:
                await box.exec("true", timeout=30)
            except SandboxClosedError:  # its time ran out while it waited
                await box.__aexit__(None, None, None)
            else:
                return box
        raise SandboxError("the pool is closed", remedy="take boxes inside `async with pool`")


async def _settled(task: asyncio.Task[Box]) -> Box | None:
    """The box of a task, once it is made; None if it could not be."""
    await asyncio.wait([task])
    return task.result() if not task.cancelled() and task.exception() is None else None

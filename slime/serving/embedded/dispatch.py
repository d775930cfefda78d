"""The bridge between the HTTP event loop and the engine's worker thread.

Owns the names of the requests in flight. Invariant: a request whose consumer goes away, for whatever reason,
is aborted in the engine and its name is free again. Knows nothing of JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from functools import partial

from slime.errors import EngineRequestError, EngineUnavailableError
from slime.serving.embedded.core import EngineCore
from slime.serving.embedded.request import Request, Update


class RequestFailedError(Exception):
    """The engine ended a request with an HTTP status, e.g. 503 because its worker died."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class _Mailbox:
    """Newest update of each request of a call; later ones replace earlier ones, which they include."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._ready = asyncio.Event()
        self._newest: dict[int, Update] = {}

    def put(self, index: int, update: Update) -> None:
        """Called on the engine's thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(self._store, index, update)

    def _store(self, index: int, update: Update) -> None:
        self._newest[index] = update
        self._ready.set()

    async def take(self) -> dict[int, Update]:
        """Wait for updates, and return those that came since the last call."""
        await self._ready.wait()
        self._ready.clear()
        taken, self._newest = self._newest, {}
        return taken


class Dispatcher:
    """Runs requests on the engine for coroutines of one event loop."""

    def __init__(self, engine: EngineCore) -> None:
        self._engine = engine
        self._calls: dict[str, list[str]] = {}

    @property
    def num_in_flight(self) -> int:
        """Requests that have not ended."""
        return sum(map(len, self._calls.values()))

    async def updates(
        self, requests: Sequence[Request], name: str | None = None
    ) -> AsyncGenerator[tuple[int, Update], None]:
        """Submit `requests` and yield (index, update) until all have ended. Close it (`aclosing`) to abort.

        Raises:
            EngineRequestError: a name is already in flight.
            EngineUnavailableError: the engine's worker is not alive.
            RequestFailedError: the engine ended a request with an HTTP status.
        """
        call = self._claim(requests, name)
        mailbox = _Mailbox(asyncio.get_running_loop())
        open_rids = self._calls[call]
        try:
            for index, request in enumerate(requests):
                self._engine.submit(request, partial(mailbox.put, index))
            while open_rids:
                for index, update in (await mailbox.take()).items():
                    if update.finish_reason is not None:
                        open_rids.remove(update.rid)
                        _raise_failure(update.finish_reason)
                    yield index, update
        finally:
            del self._calls[call]
            with contextlib.suppress(EngineUnavailableError):  # a dead engine has nothing to abort
                for rid in open_rids:
                    self._engine.abort(rid)

    async def run(self, requests: Sequence[Request], name: str | None = None) -> list[Update]:
        """The last update of each request, in order. Raises as `updates`."""
        last = dict([pair async for pair in self.updates(requests, name)])
        return [last[index] for index in range(len(requests))]

    def abort(self, name: str) -> None:
        """Abort the request, or all requests of the call, with this name. Unknown names are ignored."""
        for rid in self._calls.get(name, [name]):
            self._engine.abort(rid)

    def _claim(self, requests: Sequence[Request], name: str | None) -> str:
        taken = {rid for rids in self._calls.values() for rid in rids}.union(self._calls)
        for rid in {name or requests[0].rid, *(request.rid for request in requests)}:
            if rid in taken:
                raise EngineRequestError(f"Duplicate request ID detected: {rid}")
        call = name or requests[0].rid
        self._calls[call] = [request.rid for request in requests]
        return call


def _raise_failure(finish_reason: dict[str, object]) -> None:
    status = finish_reason.get("status_code")
    if isinstance(status, int):
        raise RequestFailedError(status, str(finish_reason.get("message")))

"""An aiohttp application on a thread of its own, with its own event loop.

Invariant: `stop` returns with the port closed and the thread gone. Knows nothing of what is served.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import socket
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aiohttp import web
from aiohttp.abc import AbstractAccessLogger

from slime.errors import DeadlineError

_SLOW_SECONDS = 120.0


class FilteredAccessLogger(AbstractAccessLogger):
    """Logs answers other than 200, and those that took over two minutes."""

    def log(self, request: web.BaseRequest, response: web.StreamResponse, time: float) -> None:
        """One line for a request that is worth it."""
        if response.status != 200 or time > _SLOW_SECONDS:
            self.logger.info("%s %s %s %.1f s", request.method, request.path, response.status, time)


_OPTIONS: dict[str, Any] = {
    "access_log_class": FilteredAccessLogger,
    "handler_cancellation": True,
    "shutdown_timeout": 2.0,
}


@dataclass
class AppHandle:
    """A running application.

    Attributes:
        host: what it is bound to.
        port: the port, also where 0 was asked for.
    """

    host: str
    port: int
    thread: threading.Thread
    loop: asyncio.AbstractEventLoop
    runner: web.AppRunner
    _end: asyncio.Event

    @property
    def url(self) -> str:
        """Base URL for clients on this machine."""
        host = "127.0.0.1" if self.host in ("0.0.0.0", "::", "") else self.host
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    def stop(self) -> None:
        """Close the port, end the requests in flight and the thread; further calls do nothing."""
        if self.thread.is_alive():
            self.loop.call_soon_threadsafe(self._end.set)
            self.thread.join()


def run_app_in_thread(
    app: web.Application,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    thread_name: str = "aiohttp-app",
    start_timeout_sec: float = 15,
    runner_kwargs: Mapping[str, Any] | None = None,
    sock: socket.socket | None = None,
) -> AppHandle:
    """Serve `app` from a daemon thread; returns when it listens.

    Args:
        host: loopback by default; sandboxes and other machines need an address that they can reach.
        port: 0 takes a free one.
        sock: a listening socket to serve instead, such as one inside a sandbox.

    Raises:
        OSError: the address cannot be bound.
        DeadlineError: it does not listen within `start_timeout_sec`.
    """
    started: concurrent.futures.Future[AppHandle] = concurrent.futures.Future()
    options = _OPTIONS | dict(runner_kwargs or {})

    def main() -> None:
        try:
            asyncio.run(_serve(app, sock or (host, port), options, started))
        except Exception as error:  # the thread's boundary: it is raised where the start is waited for
            if started.done():
                raise
            started.set_exception(error)

    thread = threading.Thread(target=main, name=thread_name, daemon=True)
    thread.start()
    try:
        return started.result(start_timeout_sec)
    except TimeoutError as error:
        raise DeadlineError(
            f"the application did not listen within {start_timeout_sec:g} s", place=f"{host}:{port}"
        ) from error


async def serve_app(
    app: web.Application, *, host: str = "127.0.0.1", port: int = 0, sock: socket.socket | None = None
) -> tuple[web.AppRunner, int]:
    """Serve `app` on the running loop; returns the runner, whose `cleanup` ends it, and the port."""
    runner = web.AppRunner(app, **_OPTIONS)
    return runner, await _listen(runner, sock or (host, port))


async def _listen(runner: web.AppRunner, where: socket.socket | tuple[str, int]) -> int:
    async with contextlib.AsyncExitStack() as undo:
        undo.push_async_callback(runner.cleanup)
        await runner.setup()
        site = web.TCPSite(runner, *where) if isinstance(where, tuple) else web.SockSite(runner, where)
        await site.start()
        undo.pop_all()
    return int(runner.addresses[0][1])


async def _serve(
    app: web.Application,
    where: socket.socket | tuple[str, int],
    options: Mapping[str, Any],
    started: concurrent.futures.Future[AppHandle],
) -> None:
    runner, end = web.AppRunner(app, **options), asyncio.Event()
    port = await _listen(runner, where)
    host = where[0] if isinstance(where, tuple) else where.getsockname()[0]
    loop = asyncio.get_running_loop()
    started.set_result(AppHandle(host, port, threading.current_thread(), loop, runner, end))
    await end.wait()
    await runner.cleanup()

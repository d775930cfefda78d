"""An engine and its HTTP server on a thread of this process, for tests and examples.

Invariant: `stop` returns with the port closed and the threads gone. Knows nothing of which engine it is.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import socket
import threading
from typing import TYPE_CHECKING

from slime.errors import DeadlineError
from slime.serving.embedded.server import EngineServer

if TYPE_CHECKING:
    from slime.config.sections import EngineConfig
    from slime.serving.embedded.core import EngineCore


START_SECONDS = 60.0


class ServerHandle:
    """A server in the background. A context manager; leaving it stops the server.

    Attributes:
        url: ``http://127.0.0.1:<port>``.
    """

    def __init__(
        self, engine: EngineCore, config: EngineConfig, *, health_timeout: float = 20.0, port: int = 0
    ) -> None:
        """Start the engine, and its server on the loopback interface.

        Args:
            port: 0 takes a free one.
            health_timeout: seconds that `/health_generate` waits for its token.
        """
        self._engine = engine
        self._server = EngineServer(engine, config, health_timeout=health_timeout)
        self._socket = socket.create_server(("127.0.0.1", port))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self._killed = False
        self._is_ending = False
        self._end: asyncio.Event
        self._loop: asyncio.AbstractEventLoop
        engine.start()
        started: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._thread = threading.Thread(target=self._run, args=(started,), daemon=True)
        self._thread.start()
        try:
            started.result(START_SECONDS)
        except TimeoutError as error:
            raise DeadlineError(
                f"the server did not start within {START_SECONDS:g} s", place=self.url
            ) from error

    def stop(self) -> None:
        """End the server, then the engine; requests in flight are aborted. Further calls do nothing."""
        self._finish()
        self._thread.join()
        self._engine.shutdown()

    def kill(self) -> None:
        """End as a killed process would: connections are reset without an answer, the port is closed."""
        self._killed = True
        self._finish()

    def _finish(self) -> None:
        if not self._is_ending:
            self._is_ending = True
            self._loop.call_soon_threadsafe(self._end.set)

    def _run(self, started: concurrent.futures.Future[None]) -> None:
        try:
            asyncio.run(self._serve(started))
        except Exception as error:  # the thread's boundary: it is raised where the start is waited for
            if started.done():
                raise
            started.set_exception(error)

    async def _serve(self, started: concurrent.futures.Future[None]) -> None:
        self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
        await self._server.start(self._socket)
        started.set_result(None)
        await self._end.wait()
        if self._killed:
            self._server.drop_connections()
        await self._server.stop()

    def __enter__(self) -> ServerHandle:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

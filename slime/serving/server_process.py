"""`ServerProcess`: a server that we start, whatever it serves: start, readiness, log, death.

Invariant: it runs under guard.py, so neither it nor anything that it starts outlives this process; and it
never dies unseen (`wait_for_exit` tells how, with the end of its log). Knows nothing of engines or routers.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import select
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from slime.errors import EngineError

_GUARD = Path(__file__).with_name("guard.py")
_POLL_SECONDS = 0.05
_ANSWER_SECONDS = 5.0
_TAIL_BYTES = 64 * 1024
_KILL_SECONDS = 15.0


class ServerProcess:
    """One server in its own process group.

    Attributes:
        url: what `ready` said.
        pid: of the server itself, not of its guard.
    """

    def __init__(
        self,
        command: Sequence[str],
        log_file: Path,
        *,
        name: str,
        ready: Callable[[], str | None],
        env: Mapping[str, str] | None = None,
        ready_timeout: float = 300.0,
    ) -> None:
        """Start it and wait until it answers.

        Args:
            log_file: gets what it prints, behind what is there.
            name: what errors call it, e.g. ``embedded engine``.
            ready: asked again and again: the base URL once the server is ready, None before.
            env: its whole environment (default: that of this process).

        Raises:
            EngineError: it exited or was not ready in time; the message holds the end of its log.
        """
        self.name = name
        self.log_file = log_file
        log_file.parent.mkdir(parents=True, exist_ok=True)
        reader, writer = os.pipe()
        words = [sys.executable, "-I", "-S", str(_GUARD), str(os.getpid()), str(writer), *command]
        with log_file.open("ab") as log:
            self._guard = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=None if env is None else dict(env),
                pass_fds=(writer,),
                start_new_session=True,
            )
        os.close(writer)
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(self._kill)
            self.pid = self._told_pid(reader, ready_timeout)
            self.url = self._wait_until_ready(ready, ready_timeout)
            on_failure.pop_all()

    def wait_for_exit(self) -> str:
        """Block until the server is gone; returns how it ended and the end of its log."""
        code = self._guard.wait()
        how = f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
        return f"the {self.name} process {how}; the end of {self.log_file}:\n{self.log_tail()}"

    def stop(self, timeout: float = 5.0) -> None:
        """Ask the server to end; after `timeout` seconds kill it and all that it started."""
        self._guard.terminate()
        try:
            self._guard.wait(timeout)
        except subprocess.TimeoutExpired:
            self._kill()

    def log_tail(self, lines: int = 15) -> str:
        """The last lines of the server's log."""
        with self.log_file.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - _TAIL_BYTES))
            text = log.read().decode(errors="replace")
        return "\n".join(f"    {line}" for line in text.splitlines()[-lines:])

    @property
    def is_alive(self) -> bool:
        """Whether the server runs."""
        return self._guard.poll() is None

    def _kill(self) -> None:
        self._guard.send_signal(signal.SIGQUIT)
        try:
            self._guard.wait(_KILL_SECONDS)
        except subprocess.TimeoutExpired:
            self._guard.kill()
            self._guard.wait()

    def _told_pid(self, reader: int, timeout: float) -> int:
        readable, _, _ = select.select([reader], [], [], timeout)
        word = os.read(reader, 32) if readable else b""
        os.close(reader)
        if not word:
            self._kill()
            raise EngineError(f"did not start: {self.wait_for_exit()}", place=self.name)
        return int(word)

    def _wait_until_ready(self, ready: Callable[[], str | None], timeout: float) -> str:
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            if not self.is_alive:
                raise EngineError(f"did not start: {self.wait_for_exit()}", place=self.name)
            url = ready()
            if url is not None:
                return url
            time.sleep(_POLL_SECONDS)
        raise EngineError(
            f"was not ready within {timeout:g} s; its log ends:\n{self.log_tail()}", place=self.name
        )


def answers(url: str, path: str = "/health") -> Callable[[], str | None]:
    """A `ready` of servers that answer `path` with a status below 400 once they are."""
    # Proxies of the environment are for others' servers.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def ready() -> str | None:
        try:
            with opener.open(url + path, timeout=_ANSWER_SECONDS):
                return url
        except (OSError, http.client.HTTPException):
            return None

    return ready

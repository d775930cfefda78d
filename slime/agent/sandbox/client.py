"""The owner's side of one box: starts its program, and asks it to run, kill, open and listen.

Invariant: every request has an answer, or the box is declared dead within `REPLY_SECONDS`; answers are
matched by id, so that a cancelled request cannot shift them. Knows nothing of users, limits or workspaces.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from slime.agent.sandbox.base import SandboxClosedError, SandboxError
from slime.agent.sandbox.box.wire import Message, Spec, memory_file, receive, send
from slime.agent.sandbox.streams import Capture

REPLY_SECONDS = 20.0
PROGRAM = Path(__file__).parent / "box"
_BOOT = (
    "import sys, types; box = types.ModuleType('slime_box'); box.__path__ = [sys.argv[1]]; "
    "sys.modules['slime_box'] = box; "
    "from slime_box.main import main; main(int(sys.argv[2]), int(sys.argv[3]))"
)


Wrap = Callable[[list[str]], list[str]]


def unwrapped(arguments: list[str]) -> list[str]:
    """Start the box's program as it is."""
    return arguments


class Outcome(NamedTuple):
    """How a program ended. `code` is None where it was killed for its time; `failure` says why it did not
    start.
    """

    code: int | None
    stdout: str
    stderr: str
    failure: str | None


class Started(NamedTuple):
    """What a new box says: its first process's pid on the host, and directories (image, workspace, upper
    layer).
    """

    first: int
    shown: list[int]


class Client:
    """One running box. `wrap` turns the program's arguments into those that start it (e.g. under
    bubblewrap).
    """

    def __init__(self, spec: Spec, wrap: Wrap = unwrapped) -> None:
        self.spec = spec
        self.started_at = time.monotonic()
        self._ids = itertools.count(1)
        self._lock = asyncio.Lock()
        self._captures: list[Capture] = []
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel.setblocking(False)
        body = memory_file(spec.dump())
        try:
            command = [sys.executable, "-I", "-S", "-c", _BOOT, str(PROGRAM), str(theirs.fileno()), str(body)]
            passed = (theirs.fileno(), body, *spec.join, *spec.counted)
            self.process = subprocess.Popen(
                wrap(command), pass_fds=passed, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env={},
                start_new_session=True,
            )  # fmt: skip
        finally:
            os.close(body)
            theirs.close()

    async def ready(self) -> Started:
        """Wait until the box can be used.

        Raises:
            SandboxError: it could not be made; says at which call.
        """
        first = self.process.pid if self.spec.kind != "namespaces" else None
        shown: list[int] | None = None
        while first is None or shown is None:
            message, descriptors = await self._next(REPLY_SECONDS)
            if "failed" in message:
                raise SandboxError(
                    f"the box could not be made: {message['failed']}", place=f"sandbox {self.spec.id}"
                )
            first = message.get("first", first)
            shown = descriptors if "ready" in message else shown
        return Started(first, shown)

    async def ask(
        self, do: str, descriptors: Sequence[int] = (), **fields: object
    ) -> tuple[Message, list[int]]:
        """One request and its answer.

        Raises:
            OSError: the box's call failed, with its number.
            SandboxClosedError: the box is gone or does not answer.
        """
        async with self._lock:
            number = next(self._ids)
            try:
                send(self._channel, {"do": do, "id": number, **fields}, list(descriptors))
            except OSError as error:
                raise self._gone() from error
            while True:
                message, received = await self._next(REPLY_SECONDS)
                if message.get("id") == number:
                    break
                close_all(received)  # the answer to a request that was cancelled
        if "error" in message:
            raise OSError(message.get("errno") or 0, message["error"])
        return message, received

    async def _next(self, seconds: float) -> tuple[Message, list[int]]:
        if not await readable(self._channel.fileno(), seconds):
            self.process.kill()
            raise SandboxClosedError(
                f"the box did not answer within {seconds:g} s and was killed", place=f"sandbox {self.spec.id}"
            )
        try:
            received = receive(self._channel)
        except OSError as error:
            raise self._gone() from error
        if received is None:
            raise self._gone()
        return received

    def _gone(self) -> SandboxClosedError:
        over = time.monotonic() - self.started_at >= self.spec.seconds
        why = f"the box's time ({self.spec.seconds:g} s) is over" if over else "the box is closed or died"
        return SandboxClosedError(why, place=f"sandbox {self.spec.id}")

    async def run(
        self, argv: list[str], *, cwd: str, env: dict[str, str], stdin: bytes, timeout: float, max_output: int
    ) -> Outcome:
        """Run a program to its end, or kill its tree after `timeout` seconds or on cancellation."""
        pipes = [os.pipe2(os.O_CLOEXEC) for _ in range(3)]
        given = [memory_file(stdin), *(write for _, write in pipes)]
        status = pipes[2][0]
        with contextlib.ExitStack() as undo:
            undo.callback(close_all, [read for read, _ in pipes])
            try:
                answer = await self._start(given, argv=argv, cwd=cwd, env=env)
            finally:
                close_all(given)
            undo.pop_all()
        captures = [Capture(read, max_output) for read, _ in pipes[:2]]
        self._captures = [capture for capture in (*self._captures, *captures) if capture.open]
        try:
            ended = await self._wait_for(status, answer["pid"], timeout)
            text = os.read(status, 4096).decode() if ended or await readable(status, 1.0) else ""
        finally:
            os.close(status)
        stdout, stderr = (capture.take() for capture in captures)
        if not text and ended and not await self.alive():
            raise self._gone()
        return self._outcome(text, ended, stdout, stderr)

    async def _start(self, given: Sequence[int], **fields: object) -> Message:
        """Ask for a program to be started; one that is cancelled meanwhile is killed when it is known."""
        asked = asyncio.ensure_future(self.ask("run", given, **fields))
        try:
            answer, _ = await asyncio.shield(asked)
        except asyncio.CancelledError:
            with contextlib.suppress(OSError, SandboxClosedError):  # it did not start, or ended with its box
                answer, _ = await asked
                await self.ask("kill", pid=answer["pid"])
            raise
        return answer

    @staticmethod
    def _outcome(text: str, ended: bool, stdout: str, stderr: str) -> Outcome:
        if text.startswith("!"):
            return Outcome(127, stdout, stderr, text[1:].partition("\n")[0])
        code = int(text) if text else 137  # no line: its supervisor was killed with it
        return Outcome(code if ended else None, stdout, stderr, None)

    async def _wait_for(self, status: int, supervisor: int, timeout: float) -> bool:
        """Whether the program ended in time; its tree is gone in any case when this returns or raises."""
        try:
            if await readable(status, timeout):
                return True
        except asyncio.CancelledError:
            await asyncio.shield(self.ask("kill", pid=supervisor))
            raise
        await self.ask("kill", pid=supervisor)
        return False

    async def alive(self) -> bool:
        """Whether the box still answers."""
        try:
            await self.ask("limits")
        except SandboxClosedError:
            return False
        return True

    async def close(self, seconds: float = 10.0) -> None:
        """End the box; returns when its program has cleaned up after it, or was killed for not doing so."""
        for capture in self._captures:
            capture.close()
        self._channel.close()
        await asyncio.to_thread(self._reap, seconds)

    def _reap(self, seconds: float) -> None:
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


async def readable(descriptor: int, seconds: float) -> bool:
    """Wait until a descriptor can be read (or is at its end); False after `seconds`."""
    loop = asyncio.get_running_loop()
    ready = loop.create_future()

    def notice() -> None:
        if not ready.done():
            ready.set_result(None)

    loop.add_reader(descriptor, notice)
    try:
        async with asyncio.timeout(seconds):  # Python 3.11's wait_for can lose a cancellation
            await ready
    except TimeoutError:
        return False
    finally:
        loop.remove_reader(descriptor)
    return True


def close_all(descriptors: Sequence[int]) -> None:
    """Close each descriptor."""
    for descriptor in descriptors:
        os.close(descriptor)

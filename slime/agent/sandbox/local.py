"""`LocalSandbox`: a box on this machine, without a daemon: its own root, processes and network, a
copy-on-write workspace.

Invariant: what a box can see, reach and use is what `isolation` says; where this machine cannot give the
strongest kind, the box says so (`backend`, and one warning in the log) or, with `require`, is not made.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from slime.agent.sandbox.assembly import Assembled, Wanted, assemble, program_prefix
from slime.agent.sandbox.backends import Backend, choose
from slime.agent.sandbox.base import (
    DEFAULT_MAX_OUTPUT,
    EXIT_TIME_BUDGET_EXCEEDED,
    Command,
    Content,
    ExecResult,
    Limits,
    SandboxClosedError,
    SandboxError,
    SandboxFileError,
    SandboxFileNotFoundError,
    checked,
    content_bytes,
)
from slime.agent.sandbox.client import Client, close_all
from slime.agent.sandbox.diff import tree_diff
from slime.agent.sandbox.leases import MARKER, reap_leases, release_lease, write_lease

_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_FIXED = {"LANG": "C.UTF-8", "TERM": "dumb", "TAR_OPTIONS": "--no-same-owner"}  # there is one owner only
_reaped = False


class LocalSandbox:
    """A box of processes on this machine.

    Args:
        image: a directory whose content the workspace starts with; it is never written to. None: an empty
        workspace.
        limits: what all processes of the box may use together.
        workdir: where the box sees its workspace (a `plain` box: a directory of its own; see the attribute).
        ports: loopback ports of the box to listen on from here, see `sockets` and `listen`.
        binds: further directories and files of the host to show, read-only: host path to box path.
        env: environment of every command.
        require: the weakest backend to accept is this one; None takes the best that works.
        storage: whether what the box writes is kept in memory (a hard limit, gone with the box) or on disk.

    Attributes:
        sandbox_id: unique name. backend: the kind of box it became. workdir: its workspace, as the box sees
        it.
        isolation: what keeps what apart, in words. sockets: listening sockets of `ports`.
    """

    kills_trees = True
    users = ("root", "agent")

    def __init__(
        self,
        image: Path | str | None = None,
        *,
        limits: Limits | None = None,
        workdir: str = "/workspace",
        ports: Sequence[int] = (),
        binds: Mapping[str, str] | None = None,
        env: Mapping[str, str] | None = None,
        require: Backend | None = None,
        storage: Literal["memory", "disk"] = "memory",
    ) -> None:
        self.sandbox_id = f"box-{uuid.uuid4().hex[:16]}"
        self.workdir = workdir
        self.ports = tuple(ports)
        self.env = dict(env or {})
        self.require = require
        self.backend: Backend = "plain"
        self.isolation: dict[str, str] = {}
        self.sockets: dict[int, socket.socket] = {}
        self._wanted = Wanted(
            name=self.sandbox_id,
            image=Path(image).resolve() if image is not None else None,
            limits=limits or Limits(),
            workdir=workdir,
            binds={**program_prefix("node"), **(binds or {})},
            storage=storage,
        )
        self._running: _Running | None = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def start(self) -> None:
        """Make the box. The first of a process also removes what crashed owners left.

        Raises:
            SandboxUnavailableError: the required backend does not work here.
            SandboxError: it could not be made.
        """
        await _reap_once()
        self.backend, overlay = await choose(self.require)
        made = await asyncio.to_thread(assemble, self._wanted, self.backend, overlay=overlay)
        self.isolation, self.workdir = made.isolation, made.spec.workdir
        write_lease(self.sandbox_id, [], Path(made.spec.staging), made.group.directories)
        async with contextlib.AsyncExitStack() as undo:
            undo.push_async_callback(lambda: asyncio.shield(self.close()))
            await self._begin(made)
            undo.pop_all()

    async def _begin(self, made: Assembled) -> None:
        try:
            client = Client(made.spec, made.wrap)
        finally:
            close_all([*made.spec.join, *made.spec.counted])
        self._running = _Running(made, client, [])
        started = await client.ready()
        self._running.shown.extend(started.shown)
        first = [client.process.pid, started.first]
        write_lease(self.sandbox_id, first, Path(made.spec.staging), made.group.directories)
        for port in self.ports:
            self.sockets[port] = await self.listen(port)

    async def close(self) -> None:
        """Kill all that runs in the box and remove it. A second call does nothing."""
        running, self._running = self._running, None
        if running is not None:
            await running.client.close()
            close_all(running.shown)
        for listener in self.sockets.values():
            listener.close()
        await asyncio.to_thread(release_lease, self.sandbox_id)

    async def exec(
        self,
        cmd: Command,
        *,
        user: str = "root",
        env: Mapping[str, str] | None = None,
        timeout: float = 120,
        check: bool = False,
        idempotent: bool = True,
        cwd: str | None = None,
        stdin: str | bytes = b"",
        max_output: int = DEFAULT_MAX_OUTPUT,
    ) -> ExecResult:
        """Run a shell command or an argument list, in `cwd` (the workspace by default).

        Its time over, all that it started is killed and the code is `EXIT_TIME_BUDGET_EXCEEDED`. Each output
        stream keeps `max_output` bytes, its beginning and its end.

        Raises:
            SandboxCommandError: it failed and `check` is set.
            SandboxError: it cannot be started (no such user or directory, too long a command).
            SandboxClosedError: the box is closed, or its time is over.
        """
        running = self._use()
        argv = ["/bin/bash", "-c", cmd] if isinstance(cmd, str) else list(cmd)
        before = await running.limits_passed()
        outcome = await running.client.run(
            argv,
            cwd=cwd or self.workdir,
            env={**self._environment(user), **(env or {})},
            stdin=stdin.encode() if isinstance(stdin, str) else stdin,
            timeout=timeout,
            max_output=max_output,
        )
        if outcome.failure is not None:
            remedy = (
                "write a long text to a file, or give it as `stdin`"
                if "too long" in outcome.failure
                else None
            )
            raise SandboxError(
                f"cannot run: {outcome.failure}", place=f"sandbox {self.sandbox_id}", remedy=remedy
            )
        after = await running.limits_passed()
        result = ExecResult(
            EXIT_TIME_BUDGET_EXCEEDED if outcome.code is None else outcome.code,
            *(outcome.stdout, outcome.stderr),
            timed_out=outcome.code is None,
            limit=next((name for name, times in after.items() if times > before.get(name, 0)), None),
        )
        return checked(result, cmd, self.sandbox_id) if check else result

    async def write_file(
        self, path: str, content: Content, *, user: str = "root", mode: int | None = None
    ) -> None:
        """Write a file as a program of the box would: links are followed inside the box only.

        Raises:
            SandboxFileError: it cannot be written.
        """
        data = await asyncio.to_thread(content_bytes, content)
        self._environment(user)
        file = await self._open(path, writes=True, mode=mode)
        await asyncio.to_thread(self._write, file, path, data)

    def _write(self, file: int, path: str, data: bytes) -> None:
        try:
            with os.fdopen(file, "wb") as opened:
                opened.write(data)
        except OSError as error:
            raise self._file_error(path, error) from error

    async def read_bytes(self, path: str, *, user: str = "root", max_bytes: int = 64 << 20) -> bytes:
        """A file's content, read as a program of the box would.

        Raises:
            SandboxFileNotFoundError: there is none.
            SandboxFileError: it is no regular file, cannot be read, or holds more than `max_bytes`.
        """
        self._environment(user)
        file = await self._open(path, writes=False)
        with os.fdopen(file, "rb") as opened:
            data = await asyncio.to_thread(opened.read, max_bytes + 1)
        if len(data) > max_bytes:
            raise SandboxFileError(
                f"{path} holds more than {max_bytes} bytes", place=f"sandbox {self.sandbox_id}"
            )
        return data

    async def read_file(self, path: str, *, user: str = "root") -> str:
        """A file's text (UTF-8, invalid bytes replaced). Raises as `read_bytes` does."""
        return (await self.read_bytes(path, user=user)).decode(errors="replace")

    async def diff(self, *, exclude: Sequence[str] = (".git",), max_bytes: int = 64 << 20) -> str:
        """What changed in the workspace since the box was made, as a patch that `git apply` takes.

        `exclude`: glob patterns; a path is left out if it, one of its parents, or its name matches one.

        Raises:
            SandboxError: the patch would be longer than `max_bytes`, or a changed file is.
        """
        shown = self._use().shown
        return await asyncio.to_thread(tree_diff, *shown, exclude=exclude, max_bytes=max_bytes)

    async def listen(self, port: int = 0) -> socket.socket:
        """A listening socket on the box's own 127.0.0.1:`port`, to be served from here; 0 takes a free one.

        It is all of the outside that the box can reach. In a `plain` box it is a port of the host.

        Raises:
            SandboxError: the port is taken.
        """
        try:
            _, received = await self._use().client.ask("listen", port=port)
        except OSError as error:
            raise SandboxError(
                f"cannot listen on port {port}: {error}", place=f"sandbox {self.sandbox_id}"
            ) from error
        return socket.socket(fileno=received[0])

    async def _open(self, path: str, *, writes: bool, mode: int | None = None) -> int:
        full = os.path.normpath(os.path.join(self.workdir, path))  # noqa: PTH118 (a path of the box, not of the host)
        try:
            _, received = await self._use().client.ask("open", path=full, writes=writes, mode=mode)
        except OSError as error:
            raise self._file_error(path, error) from error
        return received[0]

    def _file_error(self, path: str, error: OSError) -> SandboxFileError:
        kind = SandboxFileNotFoundError if error.errno == errno.ENOENT else SandboxFileError
        why = "it leads out of the box" if error.errno == errno.EXDEV else error.strerror
        return kind(f"{path}: {why}", place=f"sandbox {self.sandbox_id}")

    def _use(self) -> _Running:
        if self._running is None:
            raise SandboxClosedError("the box is not running", place=f"sandbox {self.sandbox_id}")
        return self._running

    def _environment(self, user: str) -> dict[str, str]:
        """A user's environment: nothing of the host's."""
        made = self._use().made
        if user not in made.homes:
            raise SandboxError(f"no user {user!r} in a local box; there are {', '.join(made.homes)}")
        home = made.homes[user]
        places = {"HOME": home, "TMPDIR": made.temporary, "SHELL": "/bin/bash", "USER": user, "LOGNAME": user}
        path = f"{home}/.local/bin:/opt/bin{self._bind_paths()}:{_PATH}"
        return {**places, "PATH": path, **_FIXED, MARKER: self.sandbox_id, **self.env}

    def _bind_paths(self) -> str:
        """The `bin` directories of bound installations: asked for, so they come before the host's."""
        return "".join(
            f":{box}/bin" for host, box in self._wanted.binds.items() if Path(host, "bin").is_dir()
        )


@dataclass(frozen=True)
class _Running:
    """A started box: how it was made, its client, and directory descriptors (image, workspace, upper
    layer).
    """

    made: Assembled
    client: Client
    shown: list[int]

    async def limits_passed(self) -> dict[str, int]:
        """How often each limit was passed so far."""
        passed = {"memory": self.made.group.oom_kills()}
        if self.made.spec.watch:
            answer, _ = await self.client.ask("limits")
            passed.update(answer["limits"])
        return passed


async def _reap_once() -> None:
    global _reaped
    if not _reaped:
        _reaped = True
        await asyncio.to_thread(reap_leases)

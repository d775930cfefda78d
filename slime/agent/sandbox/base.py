"""What a sandbox is: the protocol that harnesses and examples use, its values, limits and errors.

Invariant: an operation gives its result or raises; a missing file, a dead box and a passed limit are never an
empty answer. Knows no backend.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Protocol, Self

from slime.errors import SlimeError

EXIT_TIME_BUDGET_EXCEEDED = -1
"""Exit code of a command whose time ran out, and whose process tree was killed for it."""

DEFAULT_MAX_OUTPUT = 1 << 20
"""Bytes of each output stream that a result keeps; what is cut is told in the text."""

Command = str | Sequence[str]
Content = str | bytes | Path


class SandboxError(SlimeError):
    """A sandbox could not be made, used or closed."""


class SandboxUnavailableError(SandboxError):
    """This machine lacks what the wanted backend needs."""


class SandboxClosedError(SandboxError):
    """The box is closed, its time is over, or it died."""


class SandboxCommandError(SandboxError):
    """A command run with `check=True` failed."""


class SandboxFileError(SandboxError):
    """A file of the box cannot be read or written."""


class SandboxFileNotFoundError(SandboxFileError):
    """No such file in the box."""


class _Streams(NamedTuple):
    code: int
    stdout: str
    stderr: str


class ExecResult(_Streams):
    """Outcome of a command; unpacks to `(code, stdout, stderr)`.

    Attributes:
        code: exit code; 128 + n for an end by signal n; `EXIT_TIME_BUDGET_EXCEEDED` where the time ran out.
        timed_out: whether it was killed because its time ran out.
        limit: the limit (`memory`, `processes`, `disk`) that the box passed while it ran and was killed for.
    """

    timed_out: bool
    limit: str | None

    def __new__(
        cls, code: int, stdout: str, stderr: str, *, timed_out: bool = False, limit: str | None = None
    ) -> ExecResult:
        self = super().__new__(cls, code, stdout, stderr)
        self.timed_out = timed_out
        self.limit = limit
        return self

    @property
    def oom(self) -> bool:
        """Whether memory ran out while it ran."""
        return self.limit == "memory"


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of one box, all its processes together.

    Attributes:
        memory: bytes of memory that processes may hold (files kept in memory come on top, up to `disk`).
        processes: processes and threads at a time.
        disk: bytes of all files that the box writes.
        files: files and directories that it makes (kept where files live in memory).
        seconds: life of the box.
    """

    memory: int = 4 << 30
    processes: int = 1024
    disk: int = 2 << 30
    files: int = 500_000
    seconds: float = 4 * 3600.0

    def __post_init__(self) -> None:
        for name in ("memory", "processes", "disk", "files", "seconds"):
            if getattr(self, name) <= 0:
                raise SandboxError(f"Limits.{name} is {getattr(self, name)}; it must be positive")


class Sandbox(Protocol):
    """A box in which an agent works. Entered, it runs; left, it and all in it are gone."""

    @property
    def sandbox_id(self) -> str:
        """Unique name of the box."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    async def exec(
        self,
        cmd: Command,
        *,
        user: str = "root",
        env: Mapping[str, str] | None = None,
        timeout: float = 120,
        check: bool = False,
        idempotent: bool = True,
    ) -> ExecResult:
        """Run a shell command (or an argument list); `timeout` seconds, then its process tree is killed.

        `idempotent`: whether a backend may run it again when the connection broke.

        Raises:
            SandboxCommandError: it failed and `check` is set.
            SandboxClosedError: the box is gone.
        """
        ...

    async def write_file(self, path: str, content: Content, *, user: str = "root") -> None:
        """Write text, bytes, or a host file's content, making directories on the way.

        Raises:
            SandboxFileError: it cannot be written.
        """
        ...

    async def read_file(self, path: str, *, user: str = "root") -> str:
        """A file's text (UTF-8, invalid bytes replaced).

        Raises:
            SandboxFileNotFoundError: there is none.
            SandboxFileError: it cannot be read.
        """
        ...


def content_bytes(content: Content) -> bytes:
    """The bytes to write; a `Path` is a file of the host."""
    if isinstance(content, Path):
        return content.read_bytes()
    return content.encode() if isinstance(content, str) else content


def checked(result: ExecResult, cmd: Command, sandbox_id: str) -> ExecResult:
    """The result, if it is a success.

    Raises:
        SandboxCommandError: otherwise, with the end of what the command wrote.
    """
    if result.code == 0:
        return result
    shown = cmd if isinstance(cmd, str) else " ".join(cmd)
    why = "ran out of time" if result.timed_out else f"ended with {result.code}"
    if result.limit:
        why += f", the limit {result.limit!r} was passed"
    tail = (result.stderr or result.stdout)[-2000:]
    raise SandboxCommandError(f"command {why}: {shown[:500]}\n{tail}", place=f"sandbox {sandbox_id}")

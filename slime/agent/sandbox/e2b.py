"""`E2BSandbox`: a sandbox of an E2B service (or one that speaks its API), through the `e2b` package.

Invariant: transient errors are retried with full-jitter backoff, but a command only if it may run twice; the
sandbox is killed on exit. Environment variables (each also under its older name, `SWE_` for `SLIME_AGENT_`):
`SLIME_AGENT_SANDBOX_IMAGE_METADATA_KEY` (the metadata key by which the service picks the image),
`..._LIFETIME_SEC`, `..._RPC_RETRIES`, and `SLIME_AGENT_E2B_SANDBOX_SIZE`.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import random
import shlex
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from slime.agent.sandbox.base import (
    EXIT_TIME_BUDGET_EXCEEDED,
    Command,
    Content,
    ExecResult,
    SandboxClosedError,
    SandboxError,
    SandboxFileError,
    SandboxFileNotFoundError,
    SandboxUnavailableError,
    checked,
    content_bytes,
)
from slime.agent.sandbox.run import RUN_MARKER, git_diff, kill_marked

TRANSIENT = frozenset(
    {
        "RateLimitException",
        "SandboxUnreachableException",
        "ConnectError",
        "ConnectTimeout",
        "ReadError",
        "ReadTimeout",
    }
    | {
        "ServiceBusyException",
        "GuestUnresponsiveException",
        "WriteError",
        "WriteTimeout",
        "PoolTimeout",
        "RemoteProtocolError",
        "ConnectionError",
        "ConnectionResetError",
    }
)
"""Names of the errors that a later try may not meet (names, because the HTTP library below the package
varies).
"""

_GONE = frozenset({"SandboxNotRunningException", "SandboxNotFoundException"})
_MISSING = frozenset({"FileNotFoundException", "NotFoundException"})
_ENDED = frozenset({"CommandExitException"})
_PACKAGES = frozenset({"e2b", "httpx", "httpcore", "pyqwest", "connectrpc"})
_FIRST_DELAY, _LAST_DELAY = 1.0, 32.0


class E2BSandbox:
    """A remote sandbox, entered with `async with`.

    Args:
        image: the image's name. timeout: its life in seconds. image_metadata_key: metadata key that carries
        the image.
        rpc_retries: tries of a call that meets a transient error. size: the service's name for the machine's
        size.
        workdir: where `diff` looks.

    Raises:
        SandboxError: no metadata key is given.
    """

    def __init__(
        self,
        image: str,
        *,
        timeout: int | None = None,
        image_metadata_key: str | None = None,
        rpc_retries: int | None = None,
        size: str | None = None,
        workdir: str = "/workspace",
    ) -> None:
        key = image_metadata_key or _setting("SANDBOX_IMAGE_METADATA_KEY")
        if not key:
            raise SandboxError(
                "no metadata key for the image",
                place="E2BSandbox",
                remedy="set SLIME_AGENT_SANDBOX_IMAGE_METADATA_KEY, or give image_metadata_key",
            )
        self.image = image
        self.workdir = workdir
        self.timeout = timeout or int(_setting("SANDBOX_LIFETIME_SEC") or 3600)
        self.rpc_retries = (
            rpc_retries if rpc_retries is not None else int(_setting("SANDBOX_RPC_RETRIES") or 6)
        )
        prefix = f"{key.rpartition('/')[0]}/" if "/" in key else ""
        self.metadata = {key: image, f"{prefix}size": size or _setting("E2B_SANDBOX_SIZE") or "md"}
        self.sandbox_id = ""
        self._sandbox: Any = None

    async def __aenter__(self) -> Self:
        kind = _package().AsyncSandbox
        self._sandbox = await self._call(lambda: kind.create(timeout=self.timeout, metadata=self.metadata))
        self.sandbox_id = self._sandbox.sandbox_id
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Remove it. A second call does nothing."""
        sandbox, self._sandbox = self._sandbox, None
        if sandbox is not None:
            await self._call(sandbox.kill)

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
        """Run a command. Its time over, all processes that carry its marker are killed.

        Raises:
            SandboxCommandError: it failed and `check` is set.
            SandboxClosedError: the sandbox is gone.
        """
        run = f"run-{uuid.uuid4().hex[:16]}"
        script = cmd if isinstance(cmd, str) else shlex.join(cmd)
        commands = self._use().commands
        envs = {**(env or {}), RUN_MARKER: run}
        started = time.monotonic()
        try:
            done = await self._call(
                lambda: commands.run(script, envs=envs, user=user, timeout=timeout),
                retry=idempotent,
                passes=_ENDED,
            )
        except SandboxError as error:
            if not _is(error.__cause__, {"TimeoutException"}) or time.monotonic() - started < timeout:
                raise
            await kill_marked(self, run)
            return self._result(ExecResult(EXIT_TIME_BUDGET_EXCEEDED, "", "", timed_out=True), cmd, check)
        return self._result(ExecResult(done.exit_code, done.stdout, done.stderr), cmd, check)

    def _result(self, result: ExecResult, cmd: Command, check: bool) -> ExecResult:
        return checked(result, cmd, self.sandbox_id) if check else result

    async def write_file(self, path: str, content: Content, *, user: str = "root") -> None:
        """Write a file, making its directories.

        Raises:
            SandboxFileError: it cannot be written.
        """
        data = await asyncio.to_thread(content_bytes, content)
        files = self._use().files
        await self._file(path, lambda: files.write(path, data, user=user))

    async def read_file(self, path: str, *, user: str = "root") -> str:
        """A file's text.

        Raises:
            SandboxFileNotFoundError: there is none.
            SandboxFileError: it cannot be read.
        """
        files = self._use().files
        data = await self._file(path, lambda: files.read(path, format="bytes", user=user))
        return bytes(data).decode(errors="replace")

    async def diff(self, *, exclude: Sequence[str] = ()) -> str:
        """The change of the git work tree in `workdir` since its last commit. Raises as `git_diff` does."""
        return await git_diff(self, self.workdir, exclude=exclude)

    async def _file(self, path: str, call: Callable[[], Awaitable[Any]]) -> Any:
        try:
            return await self._call(call)
        except SandboxClosedError:
            raise
        except SandboxError as error:
            kind = SandboxFileNotFoundError if _is(error.__cause__, _MISSING) else SandboxFileError
            raise kind(f"{path}: {error.__cause__}", place=f"sandbox {self.sandbox_id}") from error.__cause__

    def _use(self) -> Any:
        if self._sandbox is None:
            raise SandboxClosedError("the sandbox is not running", place=f"sandbox {self.sandbox_id}")
        return self._sandbox

    async def _call(
        self, call: Callable[[], Awaitable[Any]], *, retry: bool = True, passes: frozenset[str] = frozenset()
    ) -> Any:
        """Await `call()`; an error of the package becomes ours, one whose name is in `passes` is the answer.

        Source of the delays: full jitter,
        https://aws.amazon.com/blogs/architecture/exponential-backoff-and-jitter/
        """
        tries = self.rpc_retries if retry else 0
        attempt = 0
        while True:
            try:
                return await call()
            except Exception as error:
                if _is(error, passes):
                    return error
                if attempt >= tries or not _is(error, TRANSIENT):
                    raise self._translated(error) from error
            await asyncio.sleep(random.uniform(0, min(_LAST_DELAY, _FIRST_DELAY * 2**attempt)))
            attempt += 1

    def _translated(self, error: Exception) -> Exception:
        """An error of the package, or of what it stands on, as ours; any other as it is."""
        place = f"sandbox {self.sandbox_id or self.image}"
        if _is(error, _GONE):
            return SandboxClosedError(str(error), place=place)
        if type(error).__module__.partition(".")[0] in _PACKAGES or isinstance(error, OSError):
            return SandboxError(f"{type(error).__name__}: {error}", place=place)
        return error


def _is(error: BaseException | None, names: frozenset[str] | set[str]) -> bool:
    """Whether the error, or a class that it derives from, has one of the names."""
    return error is not None and any(kind.__name__ in names for kind in type(error).__mro__)


def _setting(name: str) -> str:
    return os.environ.get(f"SLIME_AGENT_{name}") or os.environ.get(f"SWE_{name}") or ""


def _package() -> Any:
    try:
        return importlib.import_module("e2b")
    except ModuleNotFoundError as error:
        raise SandboxUnavailableError("the package e2b is not installed", remedy="pip install e2b") from error

"""`DockerSandbox`: a container of the Docker engine, driven through the `docker` command line with argument
lists.

Invariant: the container ends with its owner or its time, whichever is first: it is removed on exit, by the
next process that finds its owner gone, and ends by itself after `limits.seconds`.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

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
    SandboxUnavailableError,
    checked,
    content_bytes,
)
from slime.agent.sandbox.box.processes import start_time
from slime.agent.sandbox.client import close_all
from slime.agent.sandbox.leases import pid_namespace
from slime.agent.sandbox.run import RUN_MARKER, git_diff, kill_marked
from slime.agent.sandbox.streams import Capture

_LABEL = "slime.owner"
_MISSING, _NO_FILE = 44, 45
_ANY_SHELL = 'if command -v bash >/dev/null 2>&1; then exec bash -c "$1"; else exec sh -c "$1"; fi'
_READ = f'[ -e "$1" ] || exit {_MISSING}; [ -f "$1" ] || exit {_NO_FILE}; exec cat -- "$1"'
_WRITE = 'mkdir -p -- "$(dirname -- "$1")" && cat > "$1"'


class DockerSandbox:
    """A container, entered with `async with`.

    Args:
        image: image name. network: a docker network, or `none`. workdir: where commands run.
        limits: memory, processes and seconds are kept by the engine; `disk` only where its storage driver has
        quotas
            (`disk_quota`). binds: host path to container path, read-only. docker: the client to run.
    """

    kills_trees = True

    def __init__(
        self,
        image: str,
        *,
        limits: Limits | None = None,
        workdir: str = "/workspace",
        network: str = "bridge",
        binds: Mapping[str, str] | None = None,
        env: Mapping[str, str] | None = None,
        disk_quota: bool = False,
        docker: str = "docker",
    ) -> None:
        self.sandbox_id = f"slime-{uuid.uuid4().hex[:16]}"
        self.image = image
        self.limits = limits or Limits()
        self.workdir = workdir
        self.network = network
        self.binds = dict(binds or {})
        self.env = dict(env or {})
        self.disk_quota = disk_quota
        self.docker = docker
        self._running = False

    async def __aenter__(self) -> Self:
        await self.reap()
        await self._client(self._run_arguments(), timeout=600)
        self._running = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Remove it. A second call does nothing."""
        if self._running:
            self._running = False
            await self._client(["rm", "--force", "--volumes", self.sandbox_id])

    def _run_arguments(self) -> list[str]:
        limits = self.limits
        options = [
            "run",
            "--detach",
            "--rm",
            "--init",
            "--name",
            self.sandbox_id,
            "--label",
            f"{_LABEL}={_owner()}",
        ]
        options += [
            "--network",
            self.network,
            "--memory",
            str(limits.memory),
            "--memory-swap",
            str(limits.memory),
        ]
        options += ["--pids-limit", str(limits.processes), "--security-opt", "no-new-privileges"]
        options += ["--workdir", self.workdir, "--entrypoint", "sleep"]
        if self.network == "bridge":
            options += ["--add-host", "host.docker.internal:host-gateway"]
        if self.disk_quota:
            options += ["--storage-opt", f"size={limits.disk}"]
        for host, box in self.binds.items():
            options += ["--mount", f"type=bind,source={host},target={box},readonly"]
        return [*options, self.image, str(int(limits.seconds))]

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
        """Run a command. Its time over, all processes that carry its marker are killed in the container.

        Raises:
            SandboxCommandError: it failed and `check` is set.
            SandboxClosedError: the container is gone.
        """
        run = f"run-{uuid.uuid4().hex[:16]}"
        options = ["exec", "--interactive", "--user", user, "--workdir", cwd or self.workdir]
        for name, value in {**self.env, **(env or {}), RUN_MARKER: run}.items():
            options += ["--env", f"{name}={value}"]
        argv = ["sh", "-c", _ANY_SHELL, "sh", cmd] if isinstance(cmd, str) else list(cmd)
        data = stdin.encode() if isinstance(stdin, str) else stdin
        code, out, err = await self._call([*options, self.sandbox_id, *argv], data, timeout, max_output)
        if code is None:
            await kill_marked(self, run)
        elif code != 0 and ("No such container" in err or "is not running" in err):
            raise SandboxClosedError(err.strip()[-500:], place=f"sandbox {self.sandbox_id}")
        result = ExecResult(
            EXIT_TIME_BUDGET_EXCEEDED if code is None else code, out, err, timed_out=code is None
        )
        return checked(result, cmd, self.sandbox_id) if check else result

    async def write_file(self, path: str, content: Content, *, user: str = "root") -> None:
        """Write a file inside the container.

        Raises:
            SandboxFileError: it cannot be written.
        """
        data = await asyncio.to_thread(content_bytes, content)
        result = await self.exec(["sh", "-c", _WRITE, "sh", path], user=user, stdin=data)
        if result.code != 0:
            raise SandboxFileError(
                f"{path}: {result.stderr.strip()[-500:]}", place=f"sandbox {self.sandbox_id}"
            )

    async def read_file(self, path: str, *, user: str = "root") -> str:
        """A file's text, read inside the container.

        Raises:
            SandboxFileNotFoundError: there is none.
            SandboxFileError: it cannot be read.
        """
        result = await self.exec(["sh", "-c", _READ, "sh", path], user=user, max_output=64 << 20)
        if result.code == _MISSING:
            raise SandboxFileNotFoundError(f"{path}: no such file", place=f"sandbox {self.sandbox_id}")
        if result.code != 0:
            why = "not a regular file" if result.code == _NO_FILE else result.stderr.strip()[-500:]
            raise SandboxFileError(f"{path}: {why}", place=f"sandbox {self.sandbox_id}")
        return result.stdout

    async def diff(self, *, exclude: Sequence[str] = ()) -> str:
        """The change of the git work tree in `workdir` since its last commit. Raises as `git_diff` does."""
        return await git_diff(self, self.workdir, exclude=exclude)

    async def reap(self) -> list[str]:
        """Remove containers of this host whose owning process is gone; returns their ids."""
        columns = f'{{{{.ID}}}} {{{{.Label "{_LABEL}"}}}}'
        listed = await self._client(["ps", "--filter", f"label={_LABEL}", "--format", columns])
        gone = [line.split()[0] for line in listed.splitlines() if _orphaned(line.split()[-1])]
        if gone:
            await self._client(["rm", "--force", "--volumes", *gone])
        return gone

    async def _client(self, arguments: list[str], timeout: float = 120) -> str:
        """Run the docker client; its output.

        Raises:
            SandboxUnavailableError: there is no client or no engine.
            SandboxError: it failed or took too long.
        """
        code, out, err = await self._call(arguments, b"", timeout, DEFAULT_MAX_OUTPUT)
        if code == 0:
            return out
        why = f"took longer than {timeout:g} s" if code is None else err.strip()[-1000:]
        kind = SandboxUnavailableError if "docker daemon" in err else SandboxError
        raise kind(f"docker {arguments[0]}: {why}", place=f"sandbox {self.sandbox_id}")

    async def _call(
        self, arguments: list[str], stdin: bytes, timeout: float, max_output: int
    ) -> tuple[int | None, str, str]:
        """Exit code (None: its time ran out and the client was killed), output, errors."""
        pipes = [os.pipe() for _ in range(2)]
        with tempfile.TemporaryFile() as given:
            given.write(stdin)
            given.seek(0)
            try:
                client = await asyncio.create_subprocess_exec(
                    self.docker, *arguments, stdin=given, stdout=pipes[0][1], stderr=pipes[1][1]
                )
            except FileNotFoundError as error:
                close_all([read for read, _ in pipes])
                raise SandboxUnavailableError(
                    f"the docker client {self.docker!r} is not installed",
                    remedy="install it, or use LocalSandbox",
                ) from error
            finally:
                close_all([write for _, write in pipes])
        out, err = (Capture(read, max_output) for read, _ in pipes)
        try:
            async with asyncio.timeout(timeout):
                code: int | None = await client.wait()
        except TimeoutError:
            code = None
        finally:
            if client.returncode is None:
                client.kill()
            texts = out.take(), err.take()
            out.close()
            err.close()
        return code, *texts


def _owner() -> str:
    """This process, as a label that other processes of the host can check."""
    return f"{pid_namespace()}/{os.getpid()}/{start_time(os.getpid())}"


def _orphaned(owner: str) -> bool:
    namespace, pid, started = owner.split("/")
    return namespace == pid_namespace() and str(start_time(int(pid))) != started

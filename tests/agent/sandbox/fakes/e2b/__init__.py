"""The part of the `e2b` package that is used, over folders and processes of this machine.

`TROUBLE` holds errors that the next calls raise; `CALLS` notes every call.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path


class SandboxException(Exception):  # noqa: N818 (the names are theirs)
    pass


class TimeoutException(SandboxException):
    pass


class SandboxNotRunningException(TimeoutException):
    pass


class RateLimitException(SandboxException):
    pass


class NotFoundException(SandboxException):
    pass


class FileNotFoundException(NotFoundException):
    pass


@dataclass
class CommandResult:
    stderr: str
    stdout: str
    exit_code: int
    error: str | None = None


@dataclass
class CommandExitException(SandboxException, CommandResult):
    pass


TROUBLE: list[Exception] = []
CALLS: list[tuple[str, dict]] = []


def note(name, **given):
    CALLS.append((name, given))
    if TROUBLE:
        raise TROUBLE.pop(0)


class Commands:
    def __init__(self, folder):
        self.folder = folder

    async def run(self, cmd, *, envs=None, user=None, timeout=60):
        note("run", cmd=cmd, user=user, timeout=timeout)
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *("/bin/bash", "-c", cmd),
            env={"PATH": os.environ["PATH"], **(envs or {})}, cwd=self.folder, stdout=pipe, stderr=pipe,
        )  # fmt: skip
        try:
            out, err = await asyncio.wait_for(process.communicate(), timeout)
        except TimeoutError:
            raise TimeoutException("deadline_exceeded") from None
        result = err.decode(), out.decode(), process.returncode
        if process.returncode:
            raise CommandExitException(*result)
        return CommandResult(*result)


class Files:
    def __init__(self, folder):
        self.folder = folder

    async def write(self, path, data, user=None):
        note("write", path=path, user=user)
        target = self.folder / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)

    async def read(self, path, format="text", user=None):
        note("read", path=path, user=user)
        try:
            return bytearray((self.folder / path.lstrip("/")).read_bytes())
        except FileNotFoundError:
            raise FileNotFoundException(f"path {path} does not exist") from None


class AsyncSandbox:
    @classmethod
    async def create(cls, template=None, timeout=None, metadata=None):
        note("create", timeout=timeout, metadata=metadata)
        self = cls()
        self.sandbox_id = "i0123"
        self.folder = Path(tempfile.mkdtemp(prefix="e2b"))
        self.commands, self.files = Commands(self.folder), Files(self.folder)
        return self

    async def kill(self):
        note("kill")
        return True

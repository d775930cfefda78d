"""A sandbox of plain processes without any isolation, for tests of what a harness does in one."""

import asyncio
import os
import signal
from pathlib import Path


class ProcessSandbox:
    """Runs commands of the test's own on this machine, whoever the user.

    Attributes:
        commands: every command line that was run.
    """

    sandbox_id = "processes"

    def __init__(self, env=None):
        self.env = {**os.environ, **(env or {})}
        self.commands = []

    async def __aenter__(self):
        return self

    async def __aexit__(self, *error):
        return None

    async def exec(self, cmd, *, user="root", env=None, timeout=120, check=False, idempotent=True):
        self.commands.append(cmd)
        if "useradd" in cmd or "chown" in cmd:
            return 0, "", ""  # a test adds no user to the machine
        process = await asyncio.create_subprocess_exec(
            *("bash", "-c", cmd),
            env={**self.env, **(env or {})},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        try:
            out, err = await asyncio.wait_for(process.communicate(), timeout)
        except TimeoutError:
            os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
            return -1, "", "timed out"
        if check and process.returncode:
            raise RuntimeError(f"{cmd}: {err.decode(errors='replace')}")
        return process.returncode, out.decode(errors="replace"), err.decode(errors="replace")

    async def write_file(self, path, content, *, user="root"):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, Path):
            content = content.read_bytes()
        Path(path).write_bytes(content.encode() if isinstance(content, str) else content)

    async def read_file(self, path, *, user="root"):
        return Path(path).read_text()

"""`slime serve` as a child process: start, readiness, log, death.

Invariant: the child never outlives its owner (it asks the kernel to die with its parent) and never dies
unseen (`wait_for_exit` returns its exit code and the end of its log).
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from slime.config.flags import flags_of
from slime.config.sections import EngineConfig
from slime.errors import EngineError

TUNING = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
"""Environment of processes that run torch on CPU: big tensors get huge pages."""
QUIET = {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
"""Environment of processes that load a model: from the folder that they are given, without progress bars."""


class EngineProcess:
    """One embedded engine in its own process, listening on loopback."""

    def __init__(
        self, model: str, config: EngineConfig, log_file: Path, ready_timeout: float = 300.0
    ) -> None:
        """Start the child and wait until it answers.

        Raises:
            EngineError: it exited or was not ready in time; the message holds the end of its log.
        """
        self.log_file = log_file
        self._ready_file = log_file.with_suffix(".ready")
        self._ready_file.unlink(missing_ok=True)
        log_file.parent.mkdir(parents=True, exist_ok=True)
        with log_file.open("ab") as log:
            self._child = subprocess.Popen(
                self._command(model, config),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=TUNING | dict(os.environ) | QUIET,
            )
        self.url = self._wait_until_ready(config.host, ready_timeout)

    def wait_for_exit(self) -> str:
        """Block until the child is gone; returns how it ended and the end of its log."""
        code = self._child.wait()
        how = f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
        return f"the engine process {how}; the end of {self.log_file}:\n{self.log_tail()}"

    def stop(self, timeout: float = 5.0) -> None:
        """Terminate the child; kill it when it does not go."""
        self._child.terminate()
        try:
            self._child.wait(timeout)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()

    def log_tail(self, lines: int = 15) -> str:
        """The last lines of the child's log."""
        text = self.log_file.read_text(encoding="utf-8", errors="replace")
        return "\n".join(f"    {line}" for line in text.splitlines()[-lines:])

    @property
    def is_alive(self) -> bool:
        """Whether the child runs."""
        return self._child.poll() is None

    @property
    def pid(self) -> int:
        """Process id of the child."""
        return self._child.pid

    def _command(self, model: str, config: EngineConfig) -> list[str]:
        words = [sys.executable, "-m", "slime.cli", "serve", model, "--die-with-parent"]
        words += ["--ready-file", str(self._ready_file)]
        config = dataclasses.replace(config, port=config.port or 0)
        for row in flags_of(EngineConfig, "engine"):
            value = getattr(config, row.dest)
            if row.kind == "switch":
                words += [f"--{row.name}"] if value else []
            elif value is not None:
                words += [f"--{row.name}", str(value)]
        return words

    def _wait_until_ready(self, host: str, timeout: float) -> str:
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            if self._ready_file.exists():
                port = json.loads(self._ready_file.read_text())["port"]
                self._ready_file.unlink()
                return f"http://{host}:{port}"
            if self._child.poll() is not None:
                raise EngineError(f"did not start: {self.wait_for_exit()}", place="embedded engine")
            time.sleep(0.05)
        self.stop()
        raise EngineError(
            f"was not ready within {timeout:g} s; its log ends:\n{self.log_tail()}", place="embedded engine"
        )

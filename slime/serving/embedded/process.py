"""`slime serve` as a child process: its command line, and the file by which it says its port.

Invariant: the child never outlives its owner and never dies unseen (see server_process.py).
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path

from slime.config.flags import flags_of
from slime.config.sections import EngineConfig
from slime.serving.server_process import ServerProcess

TUNING = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
"""Environment of processes that run torch on CPU: big tensors get huge pages."""
QUIET = {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
"""Environment of processes that load a model: from the folder that they are given, without progress bars."""


class EngineProcess(ServerProcess):
    """One embedded engine in its own process, listening on loopback."""

    def __init__(
        self, model: str, config: EngineConfig, log_file: Path, ready_timeout: float = 300.0
    ) -> None:
        """Start the child and wait until it answers.

        Raises:
            EngineError: it exited or was not ready in time; the message holds the end of its log.
        """
        ready_file = log_file.with_suffix(".ready")
        ready_file.unlink(missing_ok=True)

        def announced() -> str | None:
            if not ready_file.exists():
                return None
            port = json.loads(ready_file.read_text(encoding="utf-8"))["port"]
            ready_file.unlink()
            return f"http://{config.host}:{port}"

        super().__init__(
            _command(model, config, ready_file),
            log_file,
            name="embedded engine",
            ready=announced,
            env=TUNING | dict(os.environ) | QUIET,
            ready_timeout=ready_timeout,
        )


def _command(model: str, config: EngineConfig, ready_file: Path) -> list[str]:
    words = [sys.executable, "-m", "slime.cli", "serve", model, "--ready-file", str(ready_file)]
    config = dataclasses.replace(config, port=config.port or 0)
    for row in flags_of(EngineConfig, "engine"):
        value = getattr(config, row.dest)
        if row.kind == "switch":
            words += [f"--{row.name}"] if value else []
        elif value is not None:
            words += [f"--{row.name}", str(value)]
    return words

"""`SGLangProcess`: a stock SGLang server of another environment as a child process.

Invariant: as of server_process.py. slime's own process imports nothing of SGLang.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from slime.config.passthrough import table_of
from slime.serving.embedded.process import QUIET
from slime.serving.server_process import ServerProcess, answers
from slime.serving.sglang.command import EngineLaunch


class SGLangProcess(ServerProcess):
    """One SGLang engine, or one node's part of it."""

    def __init__(
        self,
        launch: EngineLaunch,
        log_file: Path,
        *,
        python: str | None = None,
        ready_timeout: float = 900.0,
    ) -> None:
        """Start it and wait until it generates.

        Args:
            python: the interpreter that has SGLang (default: this one).

        Raises:
            ConfigError: SGLang is not installed there, or an override is not one of its fields.
            EngineError: it exited or was not ready in time; the message holds the end of its log.
        """
        table = table_of("sglang", python)
        super().__init__(
            [python or sys.executable, "-m", "sglang.launch_server", *launch.words(table)],
            log_file,
            name="SGLang",
            ready=answers(f"http://{launch.host}:{launch.port}"),
            env=dict(os.environ) | QUIET | launch.environment(table),
            ready_timeout=ready_timeout,
        )

"""The process in which checks run: ``python -m slime.rollout.rm_hub.worker PARENT_PID``.

Reads one JSON request a line from stdin (``{"function", "arguments"}``) and writes one JSON answer a line:
``{"value"[, "invalid"]}`` or ``{"error", "reason"}``.
Invariant: it dies with its parent, and nothing but answers reaches the answer pipe, whatever a check prints.
It imports only what a check needs.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from slime.errors import RewardError
from slime.rollout.rm_hub.verdict import Invalid

_ERROR_CHARS = 2000
MEMORY_LIMIT_BYTES = 4 * 1024**3
_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Serve checks until stdin closes."""
    die_with_parent(int(sys.argv[1]))
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
    die_first()
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers:
        os.dup2(2, 1)
        serve(sys.stdin.buffer, answers)


def die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when the parent ends; on other systems stdin's end must do."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            sys.exit(1)


def die_first() -> None:
    """Tell the kernel that, if memory ends, it costs least to kill this process (Linux)."""
    score = Path("/proc/self/oom_score_adj")
    if score.exists():
        score.write_text("1000", encoding="ascii")


def serve(requests: IO[bytes], answers: IO[str]) -> None:
    """Answer every request; a check that raises is answered with its error."""
    for line in requests:
        request = json.loads(line)
        try:
            function, arguments = load(request["function"]), request["arguments"]
            text = json.dumps(_answer(None if arguments is None else function(*arguments)))
        except RewardError as error:
            text = json.dumps({"error": error.message[:_ERROR_CHARS], "reason": error.reason})
        except Exception as error:  # noqa: BLE001 - the worker loop: the parent gets the reason
            said = f"raised {type(error).__name__}: {error}"[:_ERROR_CHARS]
            text = json.dumps({"error": said, "reason": type(error).__name__})
        answers.write(text + "\n")
        answers.flush()


def _answer(value: Any) -> dict[str, Any]:
    if isinstance(value, Invalid):
        return {"value": value.reward, "invalid": value.reason}
    return {"value": value}


def load(path: str) -> Callable[..., Any]:
    """The function at a dotted path."""
    module, _, name = path.rpartition(".")
    function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return function


if __name__ == "__main__":
    main()

"""A real server as a child process: what it starts ends with it, and a failure to start says why."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from slime.errors import EngineError, EngineUnavailableError
from slime.utils.engine_client import EngineClient
from tests.serving.engines import PROMPT, greedy
from tests.serving.wire import wait_for
from tests.sglang.servers import NEWER, OLDER, start_server


def descendants(pid):
    """Process ids below `pid`."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(
                stat.read_text(errors="replace").rpartition(")")[2].split()[1]
            )
        except (FileNotFoundError, ProcessLookupError):
            continue
    found = [pid]
    for known in found:
        found += [child for child, parent in parents.items() if parent == known]
    return found[1:]


def test_a_killed_server_is_told_and_leaves_nothing(sglang_model, tmp_path):
    server = start_server(NEWER, sglang_model, tmp_path / "server.log")
    started = descendants(server.pid)
    assert len(started) >= 2
    os.kill(server.pid, signal.SIGKILL)
    assert "the SGLang process was killed by signal 9" in server.wait_for_exit()
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in started))
    with pytest.raises(EngineUnavailableError):
        asyncio.run(EngineClient(server.url, retries=0).generate(PROMPT, greedy(4), timeout=20))


def test_a_server_that_cannot_start_says_why(tmp_path):
    with pytest.raises(EngineError, match=r"SGLang: did not start(.|\n)*no-such-model"):
        start_server(OLDER, tmp_path / "no-such-model", tmp_path / "server.log")

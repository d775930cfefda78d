"""Real SGLang servers for tests: which interpreter has which version, and how they are started there."""

import socket

from slime.serving.sglang.command import EngineLaunch
from slime.serving.sglang.process import SGLangProcess
from tests.serving.engines import CONFIG
from tests.sglang.install import OLDER_PYTHON, PYTHON

NEWER, OLDER = "0.5.23", "0.5.15.post1"
PYTHONS = {NEWER: str(PYTHON), OLDER: str(OLDER_PYTHON)}
VERSIONS = list(PYTHONS)
FLAGS = {
    "dtype": "float32",
    "max_total_tokens": str(CONFIG.max_total_tokens),
    "max_running_requests": CONFIG.max_running_requests,
    "context_length": str(CONFIG.context_length),
    "tool_call_parser": "qwen",
    "reasoning_parser": "qwen3",
}
ONLY_NEWER = {"load_snapshot_publish_interval": 1}


def start_server(version, model, log_file, **flags):
    """A ready server of `version` on a tiny model; the caller stops it."""
    port = free_port()
    flags = FLAGS | (ONLY_NEWER if version == NEWER else {}) | flags
    launch = EngineLaunch(model_path=str(model), host="127.0.0.1", port=port, seed=1, flags=flags)
    return SGLangProcess(launch, log_file, python=PYTHONS[version], ready_timeout=600)


def free_port():
    """A port that was free a moment ago."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]

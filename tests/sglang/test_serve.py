"""`slime serve --config` with real SGLang and router: a session finds what its engine has cached."""

import json
import signal
import subprocess
import sys

import pytest

from slime.serving.router_client import RouterClient
from tests.serving.routing import ask_all
from tests.serving.wire import ok, wait_for
from tests.sglang.install import PYTHON

TOPOLOGY = """\
sglang:
  - name: actor
    server_groups:
      - {worker_type: regular, num_gpus: 2, overrides: {max-running-requests: 4}}
"""
FLAGS = ["--sglang-max-total-tokens", "4096", "--sglang-context-length", "512", "--sglang-dtype", "float32"]
START_SECONDS = 600


@pytest.mark.slow
def test_two_engines_serve_sessions_that_stay_where_they_began(sglang_model, tmp_path):
    topology, ready, log = tmp_path / "topology.yaml", tmp_path / "ready.json", tmp_path / "serve.log"
    topology.write_text(TOPOLOGY)
    words = ["--config", str(topology), "--hf-checkpoint", str(sglang_model)]
    words += ["--sglang-python", str(PYTHON), "--router-policy", "consistent_hashing"]
    words += ["--ready-file", str(ready), "--log-dir", str(tmp_path)]
    command = [sys.executable, "-m", "slime.cli", "serve", *words, *FLAGS]
    with log.open("w") as out, subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT) as child:
        try:
            wait_for(lambda: ready.exists() or child.poll() is not None, START_SECONDS)
            assert ready.exists(), log.read_text()
            actor = json.loads(ready.read_text())["models"]["actor"]
            urls = [engine["url"] for engine in actor["engines"]]
            assert {worker.url for worker in RouterClient(actor["url"]).workers()} == set(urls)
            assert {ok(url, "/server_info")["max_running_requests"] for url in urls} == {4}
            check_sessions(actor["url"])
            child.send_signal(signal.SIGTERM)
            assert child.wait(60) == 0
        finally:
            child.kill()


def check_sessions(url):
    """The second turn of each session begins with the first, and is asked of the engine that has that."""
    prompts = {f"session-{number}": [40 + number] * 64 for number in range(8)}
    first = ask_all(url, prompts, prompts=prompts)
    later = {
        key: prompt + answer["output_ids"]
        for (key, prompt), answer in zip(prompts.items(), first, strict=True)
    }
    assert [answer["meta_info"]["cached_tokens"] for answer in first] == [0] * 8
    second = ask_all(url, later, prompts=later)
    assert all(answer["meta_info"]["cached_tokens"] >= 60 for answer in second)

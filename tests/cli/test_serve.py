"""`slime serve` as a user and as a parent process see it."""

import json
import signal
import subprocess
import sys
from contextlib import contextmanager

import pytest

from slime.cli.serve import bind, main
from slime.errors import ConfigError, ModelError
from tests.serving.wire import ok
from tests.tiny import tiny_model_dir


def test_a_taken_port_is_named_before_any_model_is_loaded():
    with bind("127.0.0.1", 0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"port {port} on 127.0.0.1 is taken\n.*--port 0"):
            main(["no-such-model", "--port", str(port)])


def test_a_missing_model_folder_is_a_model_error():
    with pytest.raises(ModelError, match="no-such-model"):
        main(["no-such-model", "--port", "0"])


def test_an_unknown_flag_and_a_host_elsewhere_are_config_errors():
    with pytest.raises(ConfigError, match="max-running-requests"):
        main(["m", "--max-runing-requests", "3"])
    with pytest.raises(ConfigError, match=r"--host: cannot listen on 192.0.2.1:0"):
        main(["m", "--host", "192.0.2.1", "--port", "0"])


def test_it_serves_says_so_and_ends_cleanly_at_a_signal(tmp_path):
    model = tiny_model_dir(tmp_path / "model")
    ready = tmp_path / "ready.json"
    words = ["serve", str(model), "--port", "0", "--ready-file", str(ready), "--served-model-name", "tiny"]
    with _started([sys.executable, "-m", "slime.cli", *words], stdout=subprocess.PIPE) as child:
        line = child.stdout.readline()
        url = f"http://127.0.0.1:{json.loads(ready.read_text())['port']}"
        assert line == f"slime serve: ready on {url}\n"
        assert ok(url, "/v1/models")["data"][0]["id"] == "tiny"
        answer = ok(url, "/generate", {"text": "hi", "sampling_params": {"max_new_tokens": 3}})
        assert answer["meta_info"]["completion_tokens"] <= 3
        child.send_signal(signal.SIGTERM)
        assert child.wait(20) == 0
        assert child.stdout.read() == ""


@contextmanager
def _started(words, **pipes):
    """A child that does not outlive a failing test."""
    with subprocess.Popen(words, text=True, **pipes) as child:
        try:
            yield child
        finally:
            child.kill()

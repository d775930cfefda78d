"""A topology on this machine: what ends its start, and that it ends."""

import subprocess
import sys

import pytest

from slime.serving.endpoint import EngineEndpoint
from slime.serving.engine_specs import plan_engines
from slime.serving.fleet import Fleet, RouterChoice
from slime.serving.launch import LaunchSettings, RunningEngine
from slime.serving.topology import single_model


def test_a_log_that_cannot_be_written_ends_the_start(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    settings = LaunchSettings(kind="embedded", log_dir=file / "logs")
    fleet = Fleet(single_model("models/actor", num_gpus=1), settings, lambda model: RouterChoice())
    with pytest.raises(NotADirectoryError):
        fleet.start()


class Sleeper:
    """A server's process that does nothing."""

    def __init__(self):
        self.process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])

    def stop(self, timeout):
        self.process.kill()


def test_engines_end_though_the_router_of_others_is_gone(tmp_path, caplog):
    topology = single_model("models/actor", num_gpus=1)
    settings = LaunchSettings(kind="embedded", log_dir=tmp_path)
    fleet = Fleet(topology, settings, lambda model: RouterChoice())
    sleeper, url = Sleeper(), "http://127.0.0.1:9"
    endpoint = EngineEndpoint(name="default/0", url=url, kind="embedded")
    fleet.engines.append(RunningEngine(spec=plan_engines(topology)[0], process=sleeper, endpoint=endpoint))
    fleet.routers["default"] = url
    try:
        fleet.stop()
        assert sleeper.process.wait(timeout=10) != 0
    finally:
        sleeper.process.kill()
    assert f"the router {url} may still list our engines" in caplog.text

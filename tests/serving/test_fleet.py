"""A topology on this machine: what ends its start."""

import pytest

from slime.serving.fleet import Fleet, RouterChoice
from slime.serving.launch import LaunchSettings
from slime.serving.topology import single_model


def test_a_log_that_cannot_be_written_ends_the_start(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    settings = LaunchSettings(kind="embedded", log_dir=file / "logs")
    fleet = Fleet(single_model("models/actor", num_gpus=1), settings, lambda model: RouterChoice())
    with pytest.raises(NotADirectoryError):
        fleet.start()

import json
import shutil
from collections import namedtuple

import pytest
import torch

from slime.backends.torch import checkpoint as module
from slime.backends.torch.checkpoint import Checkpoint, read_checkpoint, write_checkpoint
from slime.errors import CheckpointError

CONTENT = Checkpoint({"w": torch.arange(4.0)}, {}, {"torch": torch.zeros(3, dtype=torch.uint8)}, {"steps": 3})


def test_what_is_written_is_read_back_and_replaced_whole(tmp_path):
    folder = tmp_path / "a" / "b"
    write_checkpoint(folder, CONTENT)
    write_checkpoint(folder, Checkpoint({"w": torch.ones(2)}, {"m": torch.ones(1)}, {}, {"steps": 4}))
    found = read_checkpoint(folder)
    assert torch.equal(found.weights["w"].whole(), torch.ones(2))
    assert (list(found.optimizer), found.rng, found.counters) == (["m"], (), {"steps": 4})
    assert [path.name for path in folder.parent.iterdir()] == ["b"]


def test_a_full_disk_leaves_the_earlier_checkpoint_and_names_the_bytes(tmp_path, monkeypatch):
    folder = tmp_path / "c"
    write_checkpoint(folder, CONTENT)
    usage = namedtuple("usage", "total used free")(100, 95, 5)
    monkeypatch.setattr(module.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(CheckpointError, match="19 bytes are needed, 5 are free") as caught:
        write_checkpoint(folder, CONTENT)
    assert str(folder) in str(caught.value)
    assert read_checkpoint(folder).counters == {"steps": 3}
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_a_disk_that_fills_while_writing_leaves_nothing_behind(tmp_path):
    def write(place):
        (place / "half").write_text("x")
        raise OSError(28, "No space left on device")

    with pytest.raises(CheckpointError, match="disk is full"):
        module.write_folder(tmp_path / "d", write, 1)
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_checkpoint_is_said(tmp_path):
    with pytest.raises(CheckpointError, match="no checkpoint here"):
        read_checkpoint(tmp_path)
    write_checkpoint(tmp_path / "e", CONTENT)
    (tmp_path / "e" / "model.safetensors").write_bytes(b"broken")
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_checkpoint(tmp_path / "e")
    shutil.rmtree(tmp_path / "e")
    write_checkpoint(tmp_path / "e", CONTENT)
    (tmp_path / "e" / "trainer.json").write_text(json.dumps({"format": 99}))
    with pytest.raises(CheckpointError, match="format 99"):
        read_checkpoint(tmp_path / "e")


def test_only_what_slime_wrote_is_replaced(tmp_path):
    mine = tmp_path / "models"
    (mine / "llama").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="was not written by slime") as caught:
        write_checkpoint(mine, CONTENT)
    assert str(mine) in str(caught.value) and "remedy" in str(caught.value)
    assert [path.name for path in mine.iterdir()] == ["llama"]
    (mine / "llama").rmdir()
    write_checkpoint(mine, CONTENT)
    write_checkpoint(mine, CONTENT)
    (tmp_path / "file").write_text("mine")
    with pytest.raises(CheckpointError, match="was not written by slime"):
        write_checkpoint(tmp_path / "file", CONTENT)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []

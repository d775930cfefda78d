"""One weight file, many processes, no copies."""

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

import slime.serving.weights.shared as module
from slime.errors import ModelError
from slime.serving.weights.shared import SharedWeights

CHILD = """
import sys
from slime.serving.weights.shared import SharedWeights
shared = SharedWeights.open(sys.argv[1])
print(float(shared.views["a"][0, 0]), flush=True)
sys.stdin.readline()
print(float(shared.views["a"][0, 0]), flush=True)
sys.stdin.readline()
shared.views["a"][0, 1] = 7
print("written", flush=True)
"""


def tensors():
    return {
        "odd": torch.arange(3, dtype=torch.float32),
        "half": torch.ones(5, dtype=torch.bfloat16),
        "a": torch.arange(64, dtype=torch.float32).reshape(4, 16),
        "b": torch.full((8, 16), 2, dtype=torch.float16),
        "scalar": torch.tensor(3.5),
        "empty": torch.zeros(0, 4),
    }


@pytest.fixture
def shared(tmp_path):
    weights = SharedWeights.create(tensors().items(), tmp_path / "weights.safetensors")
    yield weights
    weights.unlink()


def test_two_processes_see_each_others_changes_without_a_copy(shared):
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", CHILD, str(shared.path)], **pipes) as child:
        assert child.stdout.readline() == "0.0\n"
        shared.views["a"][0, 0] = 42
        child.stdin.write("\n")
        child.stdin.flush()
        assert child.stdout.readline() == "42.0\n"
        child.stdin.write("\n")
        child.stdin.flush()
        assert child.stdout.readline() == "written\n"
    assert shared.views["a"][0, 1] == 7


def test_a_parameter_that_aliases_a_view_trains_in_the_file(shared):
    parameter = torch.nn.Parameter(torch.zeros(4, 16))
    parameter.data = shared.views["a"]
    parameter.sum().backward()
    torch.optim.SGD([parameter], lr=1.0).step()
    assert SharedWeights.open(shared.path).views["a"][0, 0] == -1


def test_the_file_is_valid_safetensors(shared):
    with safe_open(shared.path, "pt") as file:
        assert set(file.keys()) == set(tensors())
        for name, tensor in tensors().items():
            assert torch.equal(file.get_tensor(name), tensor)


def test_a_file_of_the_safetensors_library_opens(tmp_path):
    save_file(tensors(), tmp_path / "theirs.safetensors", metadata={"format": "pt"})
    views = SharedWeights.open(tmp_path / "theirs.safetensors").views
    assert views.keys() == tensors().keys()
    assert all(torch.equal(views[name], tensor) for name, tensor in tensors().items())


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=8))
def test_whole_lines_are_aligned_and_all_values_are_kept(tmp_path_factory, sizes):
    path = tmp_path_factory.mktemp("w") / "w.safetensors"
    given_tensors = {f"t{k}": torch.randn(size) for k, size in enumerate(sizes)}
    views = SharedWeights.create(given_tensors.items(), path).views
    assert all(torch.equal(views[name], tensor) for name, tensor in given_tensors.items())
    whole = [view for view in views.values() if view.numel() and view.numel() * 4 % 64 == 0]
    assert all(view.data_ptr() % 64 == 0 for view in whole)


def test_without_a_path_the_file_is_made_in_shared_memory():
    shared = SharedWeights.create(tensors().items())
    try:
        assert shared.path.exists()
        assert shared.path.name.startswith("slime-weights-")
    finally:
        shared.unlink()
    assert not shared.path.exists()


def test_where_shared_memory_cannot_be_used_the_temporary_folder_is(monkeypatch, caplog):
    monkeypatch.setattr(module, "_SHM", Path("/proc"))
    shared = SharedWeights.create(tensors().items())
    shared.unlink()
    assert shared.path.parent == Path(tempfile.gettempdir())
    assert "shared weights go to" in caplog.text


def test_views_live_on_after_unlink_and_close(shared):
    view = shared.views["a"]
    shared.unlink()
    shared.close()
    assert shared.views == {}
    assert view[0, 1] == 1


@pytest.mark.parametrize("content", [b"", b"\x05", b"\x02\0\0\0\0\0\0\0[]", b"\xff" * 64])
def test_a_file_that_is_not_safetensors_is_a_model_error(tmp_path, content):
    (tmp_path / "bad").write_bytes(content)
    with pytest.raises(ModelError, match="bad"):
        SharedWeights.open(tmp_path / "bad")


def test_a_missing_file_and_a_strange_dtype_are_model_errors(tmp_path):
    with pytest.raises(ModelError, match="cannot map the weight file"):
        SharedWeights.open(tmp_path / "none")
    with pytest.raises(ModelError, match=r"ints: weight has dtype torch.int64"):
        SharedWeights.create([("ints", torch.arange(3))], tmp_path / "w")


def test_a_hidden_file_can_be_mapped_and_leaves_no_name(tmp_path):
    shared = SharedWeights.create([("w", torch.arange(8.0))], tmp_path / "weights.safetensors")
    shared.hide()
    assert not list(tmp_path.iterdir())
    again = SharedWeights.open(shared.path)
    shared.views["w"][3] = 30.0
    assert again.inode == shared.inode and again.views["w"][3] == 30.0
    shared.unlink()

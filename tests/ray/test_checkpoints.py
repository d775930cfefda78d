"""A checkpoint counts only when it is complete, and a torn one is never resumed from."""

import json
import shutil

import pytest

from slime.errors import CheckpointError
from slime.ray.checkpoints import find, newest, refuse_later_steps, step_folder
from slime.ray.lineage import Trained
from tests.ray.steps import PARTS, write


@pytest.fixture
def root(tmp_path):
    root = tmp_path / "checkpoint"
    write(root, 3)
    write(root, 7)
    return root


def test_the_newest_complete_checkpoint_is_found(root):
    write(root, 11, commit=False)
    found = newest(root)
    assert found.checkpoint is not None
    assert (found.checkpoint.rollout_id, found.checkpoint.policy_version) == (7, 8)
    assert found.checkpoint.folder == step_folder(root, 7)
    assert found.checkpoint.trained == Trained(7, 7, "d")
    assert {part.path for part in found.checkpoint.parts} == {
        "rollout/data_source_7.json",
        *(f"step_000007/{name}" for name in PARTS),
    }
    (bad,) = found.skipped
    assert bad.folder.name == "step_000011" and "no manifest" in bad.reason and not bad.damaged


def test_steps_are_ordered_as_numbers(root):
    write(root, 1_000_000)
    found = newest(root).checkpoint
    assert found is not None and found.rollout_id == 1_000_000


def _overwrite(path, content):
    path.write_bytes(content)


FILES = [
    "step_000007/trainer/model.safetensors",
    "step_000007/critic/model.bin",
    "rollout/data_source_7.json",
]
TEARS = {
    "missing": lambda path: path.unlink(),
    "empty": lambda path: _overwrite(path, b""),
    "one byte short": lambda path: _overwrite(path, path.read_bytes()[:-1]),
    "half": lambda path: _overwrite(path, path.read_bytes()[: path.stat().st_size // 2]),
    "one byte long": lambda path: _overwrite(path, path.read_bytes() + b"\0"),
    "first byte": lambda path: _overwrite(path, b"\xff" + path.read_bytes()[1:]),
    "last byte": lambda path: _overwrite(path, path.read_bytes()[:-1] + b"\xff"),
    "zeros": lambda path: _overwrite(path, b"\0" * path.stat().st_size),
}


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("tear", TEARS)
def test_a_torn_part_is_skipped_by_name_and_the_one_before_is_found(root, file, tear):
    TEARS[tear](root / file)
    found = newest(root)
    assert found.checkpoint is not None and found.checkpoint.rollout_id == 3
    (bad,) = found.skipped
    assert bad.damaged and file in bad.reason
    assert f"step_000007 is skipped: {file}" in found.lines()[0]
    assert "after rollout step 3, policy 4, 3 rollouts trained" in found.lines()[1]


@pytest.mark.parametrize("length", [0, 1, 40, 200, -2])
def test_a_torn_manifest_is_skipped(root, length):
    path = step_folder(root, 7) / "manifest.json"
    path.write_bytes(path.read_bytes()[:length])
    found = newest(root)
    assert found.checkpoint is not None and found.checkpoint.rollout_id == 3
    assert "manifest" in found.skipped[0].reason and found.skipped[0].damaged


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"format": 1}, "format 1"),
        ({"rollout_id": 6}, "of step 6"),
        ({"parts": None}, "does not read"),
        ({"parts": {"/etc/hostname": {"size": 1, "sha256": ""}}}, "names /etc/hostname, outside"),
        ({"parts": {"../other/file": {"size": 1, "sha256": ""}}}, "names ../other/file, outside"),
        ({"trained": {"policies": 1}}, "does not read"),
    ],
)
def test_a_manifest_that_says_something_else_is_skipped(root, change, reason):
    path = step_folder(root, 7) / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    found = newest(root)
    assert found.checkpoint is not None and found.checkpoint.rollout_id == 3
    assert reason in found.skipped[0].reason


def test_a_renamed_folder_is_not_taken_for_another_step(root):
    step_folder(root, 7).rename(step_folder(root, 9))
    found = newest(root)
    assert found.checkpoint is not None and found.checkpoint.rollout_id == 3


def test_the_root_may_be_moved(root, tmp_path):
    shutil.copytree(root, tmp_path / "copy")
    shutil.rmtree(root)
    found = newest(tmp_path / "copy").checkpoint
    assert found is not None and found.rollout_id == 7 and found.trainer.is_dir()


def test_no_complete_checkpoint_is_an_error_that_lists_what_is_there_and_why(tmp_path):
    write(tmp_path, 5)
    (tmp_path / FILES[2].replace("7", "5")).unlink()
    write(tmp_path, 6, commit=False)
    with pytest.raises(CheckpointError) as caught:
        find(tmp_path, save=None)
    text = str(caught.value)
    assert "no complete checkpoint (there: rollout, step_000005, step_000006)" in text
    assert "step_000005: rollout/data_source_5.json is missing" in text
    assert "step_000006: it was not finished" in text and "remedy" in text


def test_a_folder_that_the_run_saves_to_may_be_empty_and_another_may_not(tmp_path):
    own = tmp_path / "own"
    assert find(own, save=own).checkpoint is None
    write(own, 0, commit=False)
    assert [bad.folder.name for bad in find(own, save=tmp_path / "." / "own").skipped] == ["step_000000"]
    with pytest.raises(CheckpointError, match="holds no complete checkpoint"):
        find(tmp_path / "mistyped", save=own)


def test_a_run_does_not_start_anew_where_all_is_damaged(tmp_path):
    write(tmp_path, 0)
    (tmp_path / "rollout" / "data_source_0.json").write_text("x")
    with pytest.raises(CheckpointError, match=r"step_000000: rollout/data_source_0\.json has 1 bytes"):
        find(tmp_path, save=tmp_path)


def test_a_run_that_starts_before_the_checkpoints_of_its_folder_is_refused(root):
    refuse_later_steps(root, 8)
    with pytest.raises(CheckpointError, match="holds step_000007 already, .* starts at rollout step 4"):
        refuse_later_steps(root, 4)


def test_damaged_later_steps_are_written_over(root):
    (root / FILES[0]).unlink()
    found = newest(root)
    refuse_later_steps(root, 4, found.skipped)
    write(root, 7)
    again = newest(root)
    assert again.checkpoint is not None and again.checkpoint.rollout_id == 7 and not again.skipped

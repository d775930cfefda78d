"""Old checkpoints and positions go, the newest complete one never does, and a kill at any time is safe."""

import random
import signal
import subprocess
import sys
import time

import pytest

from slime.errors import CheckpointError
from slime.ray.checkpoint_writer import CheckpointWriter
from slime.ray.checkpoints import newest, read_manifest, step_folder, step_folders
from slime.ray.lineage import Trained
from tests.e2e.conftest import ROOT
from tests.ray.steps import position, write

WRITES_WITHOUT_END = """
import sys
from pathlib import Path
from slime.ray.checkpoint_writer import CheckpointWriter
from slime.ray.checkpoints import newest
from tests.ray.steps import write
root = Path(sys.argv[1])
found = newest(root).checkpoint
step = found.next_step if found else 0
writer = CheckpointWriter(root, keep=1)
while True:
    write(root, step, writer)
    print(step, flush=True)
    step += 1
"""


def names(root):
    return [path.name for path in step_folders(root)], sorted(p.name for p in (root / "rollout").iterdir())


def test_all_checkpoints_stay_by_default_and_only_their_positions(tmp_path):
    writer = CheckpointWriter(tmp_path)
    for step in range(4):
        writer.take_position(step, position(tmp_path, step))
        if step % 2:
            write(tmp_path, step, writer)
    writer.take_position(4, position(tmp_path, 4))
    assert names(tmp_path) == (
        ["step_000001", "step_000003"],
        ["data_source_1.json", "data_source_3.json", "data_source_4.json"],
    )


@pytest.mark.parametrize("keep", [1, 2])
def test_as_many_stay_as_are_kept_with_their_positions(tmp_path, keep):
    writer = CheckpointWriter(tmp_path, keep)
    for step in range(4):
        write(tmp_path, step, writer)
    kept = range(4 - keep, 4)
    assert names(tmp_path) == (
        [f"step_{step:06d}" for step in kept],
        [f"data_source_{step}.json" for step in kept],
    )
    found = newest(tmp_path)
    assert found.checkpoint is not None and found.checkpoint.rollout_id == 3 and not found.skipped


def test_what_a_killed_run_left_goes_and_what_slime_did_not_write_stays(tmp_path):
    write(tmp_path, 0)
    write(tmp_path, 1, commit=False)
    position(tmp_path, 2)
    (tmp_path / "step_000002").mkdir()
    (tmp_path / "step_000002" / "mine").write_text("x")
    (tmp_path / "step_notes").write_text("x")
    (tmp_path / "rollout" / "mine.json").write_text("x")
    write(tmp_path, 3)
    assert names(tmp_path) == (
        ["step_000000", "step_000002", "step_000003"],
        ["data_source_0.json", "data_source_3.json", "mine.json"],
    )
    with pytest.raises(CheckpointError, match="not written by slime"):
        CheckpointWriter(tmp_path).begin(2)


def test_files_of_a_data_source_of_ones_own_go_with_their_checkpoint(tmp_path):
    from slime.utils.parts import declare

    writer = CheckpointWriter(tmp_path, keep=1)
    for step in range(3):
        files = [tmp_path / "mine" / f"{step}.{kind}" for kind in ("db", "index")]
        for file in files:
            file.parent.mkdir(exist_ok=True)
            file.write_text(str(step))
        writer.take_position(step, declare(tmp_path, files))
        writer.begin(step)
        writer.commit(step, [], policy_version=step + 1, trained=Trained())
    assert sorted(path.name for path in (tmp_path / "mine").iterdir()) == ["2.db", "2.index"]


def test_damaged_later_checkpoints_do_not_push_out_good_ones(tmp_path):
    for step in range(4):
        write(tmp_path, step)
    for step in (2, 3):
        (step_folder(tmp_path, step) / "trainer" / "trainer.json").unlink()
    writer = CheckpointWriter(tmp_path, keep=1)
    write(tmp_path, 2, writer)
    found = newest(tmp_path)
    assert found.checkpoint is not None and found.checkpoint.rollout_id == 2
    assert [bad.folder.name for bad in found.skipped] == ["step_000003"]
    write(tmp_path, 3, writer)
    assert [path.name for path in step_folders(tmp_path)] == ["step_000003"]


def test_a_checkpoint_needs_the_data_position_of_its_own_step(tmp_path):
    writer = CheckpointWriter(tmp_path)
    writer.take_position(1, position(tmp_path, 1))
    writer.begin(2)
    with pytest.raises(CheckpointError, match="data position is of step 1"):
        writer.commit(2, [], policy_version=3, trained=Trained())


def test_the_manifest_names_the_software(tmp_path):
    import json

    folder = write(tmp_path, 0)
    versions = json.loads((folder / "manifest.json").read_text())["versions"]
    assert set(versions) == {"slime", "python", "torch", "transformers"}
    assert read_manifest(folder).rollout_id == 0


def test_a_kill_at_any_moment_leaves_the_last_committed_checkpoint_or_a_newer_one(tmp_path):
    """Eight lives of a writer that keeps one checkpoint; each goes on from what the one before left."""
    rng = random.Random(0)
    committed = -1
    for _ in range(8):
        child = subprocess.Popen(
            [sys.executable, "-c", WRITES_WITHOUT_END, str(tmp_path)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert child.stdout is not None
        first = int(child.stdout.readline())
        assert first == committed + 1
        time.sleep(rng.uniform(0, 0.1))
        child.send_signal(signal.SIGKILL)
        told = [int(line) for line in child.stdout.read().splitlines()]
        child.wait()
        found = newest(tmp_path).checkpoint
        assert found is not None and found.rollout_id >= max([first, *told])
        committed = found.rollout_id

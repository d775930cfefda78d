"""Checkpoints of a run: which exist, which are complete, what each contains.

A checkpoint of rollout step N is the folder ``step_NNNNNN`` (trainer state) beside ``rollout/`` (data
position and buffer, written by the data source). Invariant: it counts only once its manifest, written
last, is there.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path

from slime.errors import CheckpointError

MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint.

    Attributes:
        rollout_id: the rollout step after which it was saved.
        policy_version: version of its weights.
    """

    folder: Path
    rollout_id: int
    policy_version: int


def step_folder(root: Path, rollout_id: int) -> Path:
    """Folder of the trainer state of a step."""
    return root / f"step_{rollout_id:06d}"


def commit(root: Path, rollout_id: int, policy_version: int) -> None:
    """Declare the checkpoint of a step complete.

    Raises:
        CheckpointError: the manifest cannot be written.
    """
    folder = step_folder(root, rollout_id)
    content = {"rollout_id": rollout_id, "policy_version": policy_version, "format": 1}
    staging = folder / (MANIFEST + ".tmp")
    try:
        staging.write_text(json.dumps(content))
        staging.replace(folder / MANIFEST)
    except OSError as error:
        raise CheckpointError(f"cannot write the manifest: {error.strerror}", place=str(folder)) from error


def newest(root: Path) -> Checkpoint:
    """The newest complete checkpoint below `root`.

    Raises:
        CheckpointError: none is complete; the message lists what is there.
    """
    folders = sorted(path for path in root.iterdir() if re.fullmatch(r"step_\d{6}", path.name))
    complete = [path for path in folders if (path / MANIFEST).is_file()]
    if not complete:
        there = ", ".join(path.name for path in root.iterdir()) or "nothing"
        raise CheckpointError(
            f"holds no complete checkpoint (there: {there})",
            place=f"--load {root}",
            remedy="name the folder that --save wrote to",
        )
    content = json.loads((complete[-1] / MANIFEST).read_text())
    return Checkpoint(complete[-1], content["rollout_id"], content["policy_version"])


def refuse_later_steps(root: Path, first_rollout_id: int) -> None:
    """A run that starts before checkpoints that are in its folder already would be resumed from those.

    Raises:
        CheckpointError: `root` holds a complete checkpoint of `first_rollout_id` or later.
    """
    for path in root.glob("step_*"):
        if (path / MANIFEST).is_file() and int(path.name.removeprefix("step_")) >= first_rollout_id:
            raise CheckpointError(
                f"holds {path.name} already, and this run starts at rollout step {first_rollout_id}",
                place=f"--save {root}",
                remedy="save to another folder, or --load this one to go on from there",
            )


def describe(checkpoint: Checkpoint) -> str:
    """One line about a checkpoint."""
    facts = {name: str(value) for name, value in asdict(checkpoint).items()}
    return f"{facts['folder']} (after rollout step {facts['rollout_id']}, policy {facts['policy_version']})"

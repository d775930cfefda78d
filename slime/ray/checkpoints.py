"""Checkpoints of a run on disk: which are there, which are complete, what each contains.

A checkpoint of rollout step N is the folder ``step_NNNNNN`` (one folder in it for each process that has a
state) and the data position below ``rollout/``. Invariant: it counts only if its manifest is there and every
part that the manifest lists has the size and the bytes that were written. Writing is checkpoint_writer.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from slime.errors import CheckpointError
from slime.ray.lineage import Trained
from slime.utils.parts import Part, faults

MANIFEST = "manifest.json"
FORMAT = 2
TRAINER = "trainer"
"""Folder of the trainer's state inside a step's."""


@dataclass(frozen=True)
class Checkpoint:
    """What a manifest says.

    Attributes:
        folder: of the step, below the root.
        rollout_id: the rollout step after which it was saved.
        policy_version: version of its weights.
        trained: what its weights were trained on.
        parts: all files, those outside of `folder` too.
    """

    folder: Path
    rollout_id: int
    policy_version: int
    trained: Trained = Trained()
    parts: tuple[Part, ...] = ()

    @property
    def next_step(self) -> int:
        """The rollout step that goes on from here."""
        return self.rollout_id + 1

    @property
    def trainer(self) -> Path:
        """Folder of the trainer's state."""
        return self.folder / TRAINER


@dataclass(frozen=True)
class Skipped:
    """A checkpoint that cannot be resumed from, and why.

    Attributes:
        damaged: it was complete once; else it was never finished.
    """

    folder: Path
    reason: str
    damaged: bool


@dataclass(frozen=True)
class Found:
    """The newest complete checkpoint, if there is one, and the newer ones that are not complete."""

    checkpoint: Checkpoint | None
    skipped: tuple[Skipped, ...] = ()

    def lines(self) -> list[str]:
        """For the log."""
        lines = [f"warning: checkpoint {bad.folder.name} is skipped: {bad.reason}" for bad in self.skipped]
        if self.checkpoint is not None:
            lines.append(f"resuming from           {describe(self.checkpoint)}")
        return lines


def step_folder(root: Path, rollout_id: int) -> Path:
    """Folder of a step."""
    return root / f"step_{rollout_id:06d}"


def step_folders(root: Path) -> list[Path]:
    """All of them by step, complete or not."""
    found = [path for path in root.glob("step_*") if re.fullmatch(r"step_\d{6,}", path.name)]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step_")))


def manifest_text(checkpoint: Checkpoint, versions: dict[str, str]) -> str:
    """The manifest of a checkpoint; inverse of `read_manifest`."""
    trained = checkpoint.trained
    return json.dumps(
        {
            "format": FORMAT,
            "rollout_id": checkpoint.rollout_id,
            "policy_version": checkpoint.policy_version,
            "trained": {"rollouts": trained.rollouts, "samples": trained.samples, "digest": trained.digest},
            "versions": versions,
            "parts": {part.path: {"size": part.size, "sha256": part.sha256} for part in checkpoint.parts},
        },
        indent=1,
    )


def read_manifest(folder: Path) -> Checkpoint:
    """What the manifest of a step says; its parts are not looked at.

    Raises:
        CheckpointError: there is no manifest, or it does not read.
    """
    path = folder / MANIFEST
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            raise CheckpointError(f"format {content['format']} of the manifest is not known", place=str(path))
        parts = tuple(Part(name, part["size"], part["sha256"]) for name, part in content["parts"].items())
        checkpoint = Checkpoint(
            folder, content["rollout_id"], content["policy_version"], Trained(**content["trained"]), parts
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"the manifest does not read: {error!r}", place=str(path)) from error
    outside = [part.path for part in parts if Path(part.path).is_absolute() or ".." in Path(part.path).parts]
    if outside:
        raise CheckpointError(f"the manifest names {outside[0]}, outside of the checkpoint", place=str(path))
    if step_folder(folder.parent, checkpoint.rollout_id).name != folder.name:
        raise CheckpointError(f"the manifest is of step {checkpoint.rollout_id}", place=str(path))
    return checkpoint


def newest(root: Path) -> Found:
    """Look for the newest complete checkpoint below `root`, from the newest on; every part is read."""
    skipped: list[Skipped] = []
    for folder in reversed(step_folders(root)):
        if not (folder / MANIFEST).is_file():
            skipped.append(Skipped(folder, "it was not finished (no manifest)", damaged=False))
            continue
        try:
            checkpoint = read_manifest(folder)
        except CheckpointError as error:
            skipped.append(Skipped(folder, error.message, damaged=True))
            continue
        wrong = faults(root, checkpoint.parts)
        if not wrong:
            return Found(checkpoint, tuple(skipped))
        skipped.append(Skipped(folder, "; ".join(wrong), damaged=True))
    return Found(None, tuple(skipped))


def find(root: Path, *, save: Path | None) -> Found:
    """The checkpoint that ``--load root`` means.

    A folder that the run itself saves to may hold none yet, so that one command starts and resumes a run; but
    not where all that it holds is damaged.

    Args:
        save: the folder of ``--save``.

    Raises:
        CheckpointError: none is complete; the message lists what is there.
    """
    found = newest(root)
    is_own = save is not None and save.resolve() == root.resolve()
    if found.checkpoint is not None or (is_own and not any(bad.damaged for bad in found.skipped)):
        return found
    there = ", ".join(sorted(path.name for path in root.iterdir())) if root.is_dir() else ""
    why = "".join(f"\n    {bad.folder.name}: {bad.reason}" for bad in found.skipped)
    raise CheckpointError(
        f"holds no complete checkpoint (there: {there or 'nothing'}){why}",
        place=f"--load {root}",
        remedy="name the folder that --save wrote to"
        if not why
        else "restore the files from a copy, or start anew in another folder",
    )


def refuse_later_steps(root: Path, first_rollout_id: int, skipped: Iterable[Skipped] = ()) -> None:
    """A run that starts before checkpoints that are in its folder already would be resumed from those.

    Args:
        skipped: damaged ones, from which nothing is resumed; the run writes over them.

    Raises:
        CheckpointError: `root` holds a checkpoint of `first_rollout_id` or later.
    """
    known = {bad.folder.resolve() for bad in skipped}
    for path in step_folders(root):
        is_later = int(path.name.removeprefix("step_")) >= first_rollout_id
        if is_later and (path / MANIFEST).is_file() and path.resolve() not in known:
            raise CheckpointError(
                f"holds {path.name} already, and this run starts at rollout step {first_rollout_id}",
                place=f"--save {root}",
                remedy="save to another folder, or --load this one to go on from there",
            )


def describe(checkpoint: Checkpoint) -> str:
    """One line about a checkpoint."""
    after = f"after rollout step {checkpoint.rollout_id}, policy {checkpoint.policy_version}"
    return f"{checkpoint.folder} ({after}, {checkpoint.trained.rollouts:,} rollouts trained)"

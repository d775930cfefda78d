"""Writes checkpoints of a run, and removes old ones.

Invariant: a checkpoint appears by one rename of its manifest, after all its parts are on the disk; the newest
complete one is never removed, and an old one loses its manifest first. At any moment a kill leaves what
`checkpoints.newest` resumes from. Knows parts and folders; the processes that own a state write it.
"""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
from collections.abc import Iterable
from pathlib import Path

from slime import __version__
from slime.backends.folder import mark, may_replace
from slime.errors import CheckpointError
from slime.ray.checkpoints import (
    MANIFEST,
    Checkpoint,
    manifest_text,
    read_manifest,
    step_folder,
    step_folders,
)
from slime.ray.lineage import Trained
from slime.utils.parts import Part, sync, write_durably

POSITIONS = ("rollout/data_source_*.json", "rollout/unfinished_*.json")
PACKAGES = ("torch", "transformers")


class CheckpointWriter:
    """The checkpoints below one ``--save`` folder.

    Args:
        keep: how many complete ones stay; None is all.
    """

    def __init__(self, root: Path, keep: int | None = None) -> None:
        self._root = root
        self._keep = keep
        self._position: tuple[int, list[Part]] = (-1, [])

    def take_position(self, rollout_id: int, parts: Iterable[Part]) -> None:
        """The data position after a step is on the disk; the one before goes, where no checkpoint has it."""
        before = [part.path for part in self._position[1]]
        self._position = (rollout_id, list(parts))
        self._remove_unlisted(before)

    def begin(self, rollout_id: int) -> Path:
        """An empty folder for the states of a step; what an unfinished or damaged one left is removed.

        Raises:
            CheckpointError: the folder cannot be made, or holds something that slime did not write.
        """
        folder = step_folder(self._root, rollout_id)
        if not may_replace(folder):
            raise CheckpointError(
                "exists and was not written by slime, so it is not replaced",
                place=str(folder),
                remedy="name another folder with --save, or move this one away",
            )
        try:
            _remove(folder)
            folder.mkdir(parents=True)
            mark(folder)
        except OSError as error:
            raise _unwritable(folder, error) from error
        return folder

    def commit(
        self, rollout_id: int, parts: Iterable[Part], *, policy_version: int, trained: Trained
    ) -> None:
        """Declare the checkpoint of a step complete, then remove what is not to be kept.

        Args:
            parts: of every process that has a state; the data position is added here.

        Raises:
            CheckpointError: the data position is of another step, or the manifest cannot be written.
        """
        step, position = self._position
        folder = step_folder(self._root, rollout_id)
        if step != rollout_id:
            raise CheckpointError(f"the data position is of step {step}", place=str(folder))
        checkpoint = Checkpoint(folder, rollout_id, policy_version, trained, (*parts, *position))
        try:
            write_durably(folder / MANIFEST, manifest_text(checkpoint, _versions()))
            sync(self._root)
            self._prune(folder)
        except OSError as error:
            raise _unwritable(folder, error) from error

    def _prune(self, newest: Path) -> None:
        """Remove unfinished folders, checkpoints beyond `keep`, and their data positions.

        What is later than `newest` is damaged, and counts for nothing: the run comes to those steps again.
        """
        folders = step_folders(self._root)
        folders = [path for path in folders[: folders.index(newest) + 1] if may_replace(path)]
        complete = [path for path in folders if (path / MANIFEST).is_file()]
        old = [] if self._keep is None else complete[: -self._keep]
        outside = [part.path for path in old for part in _parts(path)]
        for path in folders:
            if path in old or path not in complete:
                _remove(path)
        self._remove_unlisted(outside)

    def _remove_unlisted(self, paths: Iterable[str]) -> None:
        """Remove files below the root that no checkpoint lists; stray data positions of a killed run too."""
        listed = {part.path for path in step_folders(self._root) for part in _parts(path)}
        listed |= {part.path for part in self._position[1]}
        found = [path for pattern in POSITIONS for path in self._root.glob(pattern)]
        stray = [path.relative_to(self._root).as_posix() for path in found]
        for path in {*paths, *stray} - listed:
            (self._root / path).unlink(missing_ok=True)


def _parts(folder: Path) -> tuple[Part, ...]:
    """Parts of a checkpoint; none where it is not complete."""
    try:
        return read_manifest(folder).parts
    except CheckpointError:
        return ()


def _remove(folder: Path) -> None:
    """Remove a step's folder, its manifest first: a half removed checkpoint must not look complete."""
    if not folder.exists():
        return
    (folder / MANIFEST).unlink(missing_ok=True)
    sync(folder)
    shutil.rmtree(folder)


def _versions() -> dict[str, str]:
    found = {name: importlib.metadata.version(name) for name in PACKAGES}
    return {"slime": __version__, "python": platform.python_version(), **found}


def _unwritable(folder: Path, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"cannot be written: {error.strerror}", place=str(folder), remedy="check --save and the disk"
    )

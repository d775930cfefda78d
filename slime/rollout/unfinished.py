"""The groups that are out when a checkpoint is made, beside the data source's own state.

Invariant: whatever class the data source is, a resumed run gives out again each group that had not trained.
State is JSON, never pickle.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from slime.errors import CheckpointError
from slime.rollout.sample_json import group_from_json, group_to_json


def save(folder: Path, step: int, groups: list[Any]) -> None:
    """Write ``<folder>/rollout/unfinished_<step>.json``.

    Raises:
        CheckpointError: it cannot be written.
    """
    path = _path(folder, step)
    partial = path.with_suffix(".partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps([group_to_json(group) for group in groups]), encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise CheckpointError(
            f"cannot be written: {error.strerror}", place=str(path), remedy="check --save and the disk"
        ) from error


def remove(folder: Path, step: int) -> None:
    """Delete what another run left for this step."""
    _path(folder, step).unlink(missing_ok=True)


def load(folder: Path, step: int) -> list[Any]:
    """The groups of that step; none where none were written.

    Raises:
        CheckpointError: the file is damaged.
    """
    path = _path(folder, step)
    if not path.is_file():
        return []
    try:
        return [group_from_json(group) for group in json.loads(path.read_text(encoding="utf-8"))]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"is damaged: {error!r}", place=str(path)) from error


def _path(folder: Path, step: int) -> Path:
    return folder / "rollout" / f"unfinished_{step}.json"

"""Rollouts on disk: one sample a line, as JSON; never pickle.

Invariant: what is read back has the groups and siblings that were written, found by ids, not by order. A dump
is complete or not there. Names files and lines in its errors.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from slime.errors import CheckpointError, DataError
from slime.rollout.groups import flatten, rollouts_of
from slime.rollout.outcome import MemberGroup
from slime.rollout.sample_json import from_json, to_json
from slime.utils.types import Sample


def dump_path(template: str, rollout_id: int | str) -> Path:
    """The file of one step; ``{rollout_id}`` in the template is filled in."""
    return Path(template.replace("{rollout_id}", str(rollout_id)))


def save(template: str, rollout_id: int | str, samples: Any) -> Path:
    """Write samples, flat or in groups.

    Raises:
        CheckpointError: a value that JSON cannot hold, or a file that cannot be written.
    """
    path = dump_path(template, rollout_id)
    partial = path.with_name(path.name + ".partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("w", encoding="utf-8") as file:
            for sample in flatten(samples):
                file.write(json.dumps(to_json(sample)) + "\n")
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise CheckpointError(
            f"cannot write rollouts: {error.strerror}",
            place=str(path),
            remedy="check the disk and the folder",
        ) from error
    return path


def load_file(path: str | Path) -> list[Sample]:
    """The samples of one file, in order.

    Raises:
        DataError: the file cannot be read, or a line of it is damaged; names the line.
    """
    path = Path(path)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"cannot read rollouts: {error}", place=str(path), remedy="see --load-debug-rollout-data"
        ) from error
    return [_parsed(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip()]


def load_groups(template: str, rollout_id: int | str) -> list[MemberGroup]:
    """The groups of one step: flat, or nested where a rollout has siblings.

    Raises:
        DataError: as `load_file`, or there is no sample.
    """
    path = dump_path(template, rollout_id)
    groups = grouped(load_file(path))
    if not groups:
        raise DataError("holds no samples", place=str(path))
    return groups


def grouped(samples: Iterable[Sample]) -> list[MemberGroup]:
    """The groups of these samples, by their ids: flat, or nested where a rollout has siblings."""
    groups: dict[tuple[str, int], list[Sample]] = {}
    for position, sample in enumerate(samples):
        key = ("line", position) if sample.group_index is None else ("id", sample.group_index)
        groups.setdefault(key, []).append(sample)
    return [_members(group) for group in groups.values()]


def _members(group: list[Sample]) -> MemberGroup:
    rollouts = rollouts_of(group)
    fans_out = any(len(siblings) > 1 for siblings in rollouts)
    return [siblings if fans_out else siblings[0] for siblings in rollouts]


def _parsed(line: str, place: str) -> Sample:
    try:
        return from_json(json.loads(line))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise DataError(f"is not a sample: {type(error).__name__}: {error}", place=place) from error

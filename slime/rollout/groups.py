"""Groups as hooks see them: a flat list of samples, or a list of lists where rollouts fan out.

Invariant: rollouts are told apart by `rollout_id`, never by their position; only a sample whose id is unset
is taken as a rollout by itself (with its siblings where it stands in a list of its own).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from slime.utils.types import Sample


def flatten(samples: Any) -> Iterator[Sample]:
    """The samples of a sample, a group, a fan-out group or a list of groups, in order."""
    if isinstance(samples, list | tuple):
        for item in samples:
            yield from flatten(item)
    else:
        yield samples


def rollouts_of(group: Iterable[Sample | list[Sample]]) -> list[list[Sample]]:
    """The samples of each rollout, in order of first appearance."""
    rollouts: dict[tuple[str, int], list[Sample]] = {}
    for position, item in enumerate(group):
        for sample in flatten(item):
            key = ("id", sample.rollout_id) if sample.rollout_id is not None else ("position", position)
            rollouts.setdefault(key, []).append(sample)
    return list(rollouts.values())

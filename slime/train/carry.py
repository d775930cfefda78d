"""Rollouts of a step that was not full: they wait, with their advantages, for those of the next rollout step.

Invariant: a rollout waits whole, and its advantages are those of its own group, settled when that was
complete. Its ids become negative, so that they are no id of a later rollout step. Torch-free.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from slime.train.batch import Reward, TokenRewards, TrainSample, TurnRewards
from slime.utils.routes import Routes, decoded_routes, encoded_routes


@dataclass(frozen=True, slots=True)
class Waiting:
    """A row that has not trained yet, and its advantages, one a response token."""

    sample: TrainSample
    advantages: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Carry:
    """What ``--incomplete-step carry`` means in one rollout step.

    Attributes:
        waiting: rows that the rollout step before left.
        is_last: there is no further rollout step, so that nothing may wait.
    """

    waiting: Sequence[Waiting] = ()
    is_last: bool = False


def full_steps(
    samples: Sequence[TrainSample], *, rollouts_per_step: int
) -> tuple[list[list[TrainSample]], list[TrainSample]]:
    """Full steps of voting rollouts by ascending id, and the rows of the rollouts that are left."""
    rollouts: dict[int, list[TrainSample]] = defaultdict(list)
    for sample in samples:
        if sample.votes:
            rollouts[sample.rollout_id].append(sample)
    ids = sorted(rollouts)
    count = len(ids) // rollouts_per_step
    taken = [ids[k * rollouts_per_step : (k + 1) * rollouts_per_step] for k in range(count)]
    rest = ids[count * rollouts_per_step :]
    return [_rows(rollouts, step) for step in taken], _rows(rollouts, rest)


def renumbered(waiting: Iterable[Waiting]) -> list[Waiting]:
    """The rows with negative ids; rollouts keep their order, and who is whose sibling or group."""
    rows = list(waiting)
    of_sample = _negative(w.sample.index for w in rows)
    of_rollout = _negative(w.sample.rollout_id for w in rows)
    of_group = _negative(w.sample.group_index for w in rows)
    return [
        Waiting(
            replace(
                w.sample,
                index=of_sample(w.sample.index),
                rollout_id=of_rollout(w.sample.rollout_id),
                group_index=of_group(w.sample.group_index),
            ),
            w.advantages,
        )
        for w in rows
    ]


def to_json(waiting: Iterable[Waiting]) -> str:
    """The rows as JSON; numbers keep every digit."""
    return json.dumps([_plain(row) for row in waiting])


def from_json(text: str) -> list[Waiting]:
    """Inverse of `to_json`."""
    return [
        Waiting(
            TrainSample(**{name: _read(name, value) for name, value in row["sample"].items()}),
            tuple(row["advantages"]),
        )
        for row in json.loads(text)
    ]


def _rows(rollouts: dict[int, list[TrainSample]], ids: Iterable[int]) -> list[TrainSample]:
    return [sample for rollout in ids for sample in rollouts[rollout]]


def _negative(ids: Iterable[int]) -> Callable[[int], int]:
    """-1 for the greatest id, -2 for the next, ..."""
    order = sorted(set(ids), reverse=True)
    return {number: -place for place, number in zip(itertools.count(1), order)}.__getitem__


def _plain(row: Waiting) -> dict[str, Any]:
    sample = {field.name: getattr(row.sample, field.name) for field in dataclasses.fields(row.sample)}
    sample["reward"] = _plain_reward(row.sample.reward)
    sample["routed_experts"] = _plain_routes(row.sample.routed_experts)
    return {"sample": sample, "advantages": row.advantages}


def _plain_reward(reward: Reward) -> Any:
    if isinstance(reward, TurnRewards | TokenRewards):
        return {"turns" if isinstance(reward, TurnRewards) else "tokens": reward.values}
    return reward


def _plain_routes(routes: Routes | None) -> Any:
    return None if routes is None else {"shape": routes.shape, "int32": encoded_routes(routes)}


def _read(name: str, value: Any) -> Any:
    if name == "reward" and isinstance(value, dict):
        (kind, numbers), *_ = value.items()
        return TurnRewards(tuple(numbers)) if kind == "turns" else TokenRewards(tuple(numbers))
    if name == "routed_experts" and value is not None:
        return decoded_routes(value["int32"]).reshape(value["shape"])
    return tuple(value) if isinstance(value, list) else value

"""The rewards that vote in a group.

Invariant: one vote per rollout, found by `rollout_id`; a failed, aborted or unrewarded rollout does not vote.
"""

from __future__ import annotations

from typing import Any

from slime.rollout.base_types import Group
from slime.rollout.groups import rollouts_of
from slime.rollout.outcome import rollout_reward
from slime.utils.types import Sample

_VOID = (Sample.Status.FAILED, Sample.Status.ABORTED)


def votes(args: Any, group: Group) -> list[float]:
    """The reward of each rollout that counts, flat and fan-out groups alike."""
    return [
        rollout_reward(rollout, args)
        for rollout in rollouts_of(group)
        if all(sample.reward is not None and sample.status not in _VOID for sample in rollout)
    ]

"""Filters that drop groups without a learning signal: all rollouts have exactly the same reward.

Invariant: one vote per rollout, found by `rollout_id`; a failed, aborted or unrewarded rollout does not vote.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from slime.rollout.base_types import Group
from slime.rollout.filter_hub.base_types import DynamicFilterOutput
from slime.rollout.groups import rollouts_of
from slime.rollout.outcome import rollout_reward
from slime.utils.types import Sample

_VOID = (Sample.Status.FAILED, Sample.Status.ABORTED)


def check_reward_nonzero_std(args: Any, samples: Group, **kwargs: Any) -> DynamicFilterOutput:
    """Keep a group iff two of its rollouts have different rewards (compared exactly)."""
    votes = _votes(args, samples)
    if not votes:
        return DynamicFilterOutput(keep=False, reason="no_reward")
    if all(vote == votes[0] for vote in votes):
        return DynamicFilterOutput(keep=False, reason=f"zero_std_{round(votes[0], 1)}")
    return DynamicFilterOutput(keep=True)


def check_reward_nonzero_std_with_fallback(args: Any, samples: Group, **kwargs: Any) -> DynamicFilterOutput:
    """The same, but groups without signal fill the batch when no others are left."""
    output = check_reward_nonzero_std(args, samples, **kwargs)
    return dataclasses.replace(output, keep_when_insufficient=True)


def _votes(args: Any, group: Group) -> list[float]:
    rollouts = rollouts_of(group)
    return [
        rollout_reward(rollout, args)
        for rollout in rollouts
        if all(sample.reward is not None and sample.status not in _VOID for sample in rollout)
    ]

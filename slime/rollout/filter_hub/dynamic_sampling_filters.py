"""Filters that drop groups without a learning signal: all rollouts have exactly the same reward.

Invariant: one vote per rollout, found by `rollout_id`; a failed, aborted or unrewarded rollout does not vote.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from slime.rollout.base_types import Group
from slime.rollout.filter_hub.base_types import DynamicFilterOutput
from slime.rollout.filter_hub.votes import votes


def check_reward_nonzero_std(args: Any, samples: Group, **kwargs: Any) -> DynamicFilterOutput:
    """Keep a group iff two of its rollouts have different rewards (compared exactly)."""
    rewards = votes(args, samples)
    if not rewards:
        return DynamicFilterOutput(keep=False, reason="no_reward")
    if all(reward == rewards[0] for reward in rewards):
        return DynamicFilterOutput(keep=False, reason=f"zero_std_{round(rewards[0], 1)}")
    return DynamicFilterOutput(keep=True)


def check_reward_nonzero_std_with_fallback(args: Any, samples: Group, **kwargs: Any) -> DynamicFilterOutput:
    """The same, but groups without signal fill the batch when no others are left."""
    output = check_reward_nonzero_std(args, samples, **kwargs)
    return dataclasses.replace(output, keep_when_insufficient=True)

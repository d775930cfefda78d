"""Finished groups as hooks see them: flat, and nested where rollouts fan out; made up, without an engine.

Invariant: what is made is valid for training, except where a failure is asked for.
"""

from __future__ import annotations

import copy
from typing import Any

from slime.rollout.base_types import Group
from slime.rollout.outcome import Member
from slime.utils.types import Sample

FORMS = ("flat", "nested")
SIBLINGS = (2, 1, 3, 2)
"""Rows of each rollout of a nested group."""
REWARDS = (1.0, 0.0, 1.0, 0.5)
_PROMPT, _RESPONSE = (5, 6, 7), (11, 12, 13)


def group(form: str, *, number: int = 0, rewards: tuple[float, ...] = REWARDS, key: str | None = None) -> Any:
    """A group of one rollout a reward.

    Args:
        form: one of `FORMS`.
        number: group index; ids of its rollouts follow from it.
        key: rewards are dicts with this key.
    """
    members: list[Member] = []
    for slot, reward in enumerate(rewards):
        rollout = number * len(rewards) + slot
        rows = [
            _finished(number, rollout, {key: reward} if key else reward) for _ in range(SIBLINGS[slot % 4])
        ]
        members.append(rows[0] if form == "flat" else rows)
    return members


def groups(form: str, count: int, key: str | None = None) -> list[Any]:
    """Several groups."""
    return [group(form, number=number, key=key) for number in range(count)]


def failed(number: int, rollout: int) -> Sample:
    """A rollout that an error ended: it has no reward, and no vote."""
    sample = _finished(number, rollout, None)
    sample.status, sample.remove_sample = Sample.Status.FAILED, True
    sample.metadata["failure"] = "generate: ValueError"
    return sample


def snapshot(samples: list[Sample]) -> list[tuple[Any, ...]]:
    """What no hook of whole groups may change: tokens, masks, log-probs and ids."""
    return [
        copy.deepcopy(
            (s.tokens, s.response_length, s.loss_mask, s.rollout_log_probs, s.group_index, s.rollout_id)
        )
        for s in samples
    ]


def shape(group: Group | list[Any]) -> Any:
    """The nesting, with the identity of the samples in it."""
    return [shape(item) if isinstance(item, list) else id(item) for item in group]


def _finished(number: int, rollout: int, reward: Any) -> Sample:
    return Sample(
        group_index=number,
        index=rollout,
        rollout_id=rollout,
        prompt="What is 6 times 7?",
        label="42",
        tokens=[*_PROMPT, *_RESPONSE],
        response="42",
        response_length=len(_RESPONSE),
        loss_mask=[1, 1, 1],
        rollout_log_probs=[-0.5, -0.25, -0.125],
        weight_versions=["1"],
        reward=reward,
        status=Sample.Status.COMPLETED,
    )

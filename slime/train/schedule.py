"""Which rollouts make an optimizer step.

Invariant: whole rollouts only, every rollout in exactly one step, and the last, incomplete step counts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from slime.train.batch import TrainSample


def split_steps(samples: Sequence[TrainSample], *, rollouts_per_step: int) -> list[list[TrainSample]]:
    """Steps of `rollouts_per_step` voting rollouts, by ascending rollout id; the last may be smaller.

    Rows that do not vote are in no step.

    Raises:
        ValueError: `rollouts_per_step` below one.
    """
    if rollouts_per_step < 1:
        raise ValueError(f"rollouts_per_step must be at least 1, got {rollouts_per_step}")
    rollouts: dict[int, list[TrainSample]] = defaultdict(list)
    for sample in samples:
        if sample.votes:
            rollouts[sample.rollout_id].append(sample)
    ids = sorted(rollouts)
    return [
        [sample for rollout in ids[start : start + rollouts_per_step] for sample in rollouts[rollout]]
        for start in range(0, len(ids), rollouts_per_step)
    ]

"""Which rollouts make an optimizer step.

Invariant: whole rollouts only, every rollout in exactly one step, and steps of nearly equal size: each moves
the weights at the full rate, so none may rest on a remainder.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence

from slime.train.batch import TrainSample


def split_steps(samples: Sequence[TrainSample], *, rollouts_per_step: int) -> list[list[TrainSample]]:
    """Voting rollouts by ascending id, dealt evenly over ceil(rollouts / `rollouts_per_step`) steps.

    Sizes of steps differ by one rollout at most. Rows that do not vote are in no step.

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
    count = -(-len(ids) // rollouts_per_step)
    bounds = [-(-len(ids) * step // count) for step in range(count + 1)] if count else []
    return [
        [sample for rollout in ids[start:stop] for sample in rollouts[rollout]]
        for start, stop in itertools.pairwise(bounds)
    ]

"""How much each row weighs in the loss of a step, decided over the whole step before anything is packed.

Invariant: the loss of a step is the plain sum over rows of weight times the row's masked token losses,
so that cutting rollouts, packing rows and splitting micro-batches cannot change it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from slime.train.batch import TrainSample


def row_weights(samples: Sequence[TrainSample], *, per_token: bool = False) -> dict[int, float]:
    """Weight by sample index of every row that votes.

    Args:
        samples: all rows of one optimizer step.
        per_token: every trained token of the step weighs the same. Otherwise every rollout does: the loss
            is the mean over rollouts of the mean over all trained tokens of the rollout's rows.
    """
    tokens: dict[int, int] = defaultdict(int)
    for sample in samples:
        if sample.votes:
            tokens[sample.rollout_id] += sample.trained_tokens
    if per_token:
        weight = 1.0 / max(sum(tokens.values()), 1)
        return {sample.index: weight for sample in samples if sample.votes}
    return {
        sample.index: 1.0 / (max(tokens[sample.rollout_id], 1) * len(tokens))
        for sample in samples
        if sample.votes
    }

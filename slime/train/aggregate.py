"""How much each row weighs in the loss of a step, decided over the whole step before anything is packed.

Invariant: the loss of a step is the plain sum over rows of weight times the row's masked token losses,
so that cutting rollouts, packing rows and splitting micro-batches cannot change it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Literal

from slime.train.batch import TrainSample

Aggregation = Literal["rollout", "token", "sample", "prompt", "constant"]


def row_weights(
    samples: Sequence[TrainSample],
    *,
    mode: Aggregation = "rollout",
    constant: int | None = None,
    per_token: bool = False,
) -> dict[int, float]:
    """Weight by sample index of every row that votes.

    Args:
        samples: all rows of one optimizer step.
        mode: what weighs the same:
            ``rollout``: every rollout: the mean over rollouts of the mean over all trained tokens of its rows
            (GRPO, arXiv:2402.03300, where a rollout is one row).
            ``token``: every trained token of the step (DAPO, arXiv:2503.14476).
            ``sample``: every row that has a trained token: the mean over rows of token means. By its
            definition this mode, and no other, depends on how rollouts are cut.
            ``prompt``: every prompt: the mean over groups of the mean over all trained tokens of the group.
            ``constant``: every trained token of every step: the mean over rollouts of token sums divided by
            `constant` (Dr.GRPO, arXiv:2503.20783).
        constant: number of tokens, e.g. the longest response allowed; for that mode only.
        per_token: the mode ``token``, by its other name.

    Raises:
        ValueError: `constant` missing, superfluous or below one, or `per_token` with another mode.
    """
    _check(mode, constant, per_token)
    voting = [sample for sample in samples if sample.votes]
    if mode == "token" or per_token:
        return _mean_of_token_means(voting, lambda _: 0)
    if mode == "prompt":
        return _mean_of_token_means(voting, lambda sample: sample.group_index)
    if mode == "sample":
        trained = [sample for sample in voting if sample.trained_tokens]
        weights = _mean_of_token_means(trained, lambda sample: sample.index)
        return {sample.index: weights.get(sample.index, 0.0) for sample in voting}
    if constant is not None:
        rollouts = len({sample.rollout_id for sample in voting})
        return {sample.index: 1.0 / (constant * rollouts) for sample in voting}
    return _mean_of_token_means(voting, lambda sample: sample.rollout_id)


def _mean_of_token_means(
    samples: Sequence[TrainSample], unit: Callable[[TrainSample], int]
) -> dict[int, float]:
    """Weights that average, over the units that the samples belong to, the mean of each unit's tokens."""
    tokens: dict[int, int] = defaultdict(int)
    for sample in samples:
        tokens[unit(sample)] += sample.trained_tokens
    return {sample.index: 1.0 / (max(tokens[unit(sample)], 1) * len(tokens)) for sample in samples}


def _check(mode: Aggregation, constant: int | None, per_token: bool) -> None:
    if per_token and mode not in ("rollout", "token"):
        raise ValueError(f"per_token asks for the mean over tokens, mode for {mode!r}")
    if (constant is not None) != (mode == "constant"):
        raise ValueError(f"mode {mode!r} {'needs' if mode == 'constant' else 'takes no'} constant")
    if constant is not None and constant < 1:
        raise ValueError(f"constant must be at least one token, got {constant}")

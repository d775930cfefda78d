"""Sequence quantities: means and sums over all trained tokens of a rollout, whatever rows they are in.

Invariant: a rollout has one value, found by its id; no cut changes it. Knows ids and tensors only.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from slime.train.batch import TrainSample
from slime.train.stream import RowValues, TokenStream


def rollout_sums(
    values: torch.Tensor, rollouts: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sums by rollout, in float64.

    Args:
        values: [T], one a trained token.
        rollouts: [T] rollout id of each, in any order.

    Returns:
        sums [R], token counts [R], and the place [T] of each token's rollout in them. Differentiable.
    """
    ids, places = torch.unique(rollouts, return_inverse=True)
    sums = torch.zeros(len(ids), dtype=torch.float64, device=values.device)
    return sums.index_add(0, places, values.double()), torch.bincount(places, minlength=len(ids)), places


def rollout_means(values: torch.Tensor, rollouts: torch.Tensor) -> torch.Tensor:
    """[T] mean of `values` over the rollout that each token belongs to; see `rollout_sums`."""
    sums, counts, places = rollout_sums(values, rollouts)
    return (sums / counts)[places].to(values.dtype)


def mean_log_ratios(
    samples: Sequence[TrainSample], log_probs: RowValues, old_log_probs: RowValues
) -> dict[int, float]:
    """Mean over each rollout's trained tokens of log pi - log pi_old, by rollout id.

    This is the first pass that GSPO and OPSM need when a rollout's rows may be in different micro-batches:
    its result is a constant of the step. Rollouts without trained tokens are left out.

    Args:
        log_probs: under the weights that the step starts from, by sample index.
        old_log_probs: under the policy that the ratio is against, likewise.

    Raises:
        DataError: naming rollout, sample and lengths.
    """
    stream = TokenStream.of(samples)
    ratio = stream.gather("log_probs", log_probs) - stream.gather("old_log_probs", old_log_probs)
    means = rollout_means(ratio, stream.rollout_of)
    return dict(zip(stream.rollout_of.tolist(), means.tolist(), strict=True))

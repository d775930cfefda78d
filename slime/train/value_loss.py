"""The critic's loss of each trained token.

Invariant: every value is per token [T]; aggregation happens elsewhere, by weights. Knows no rows, no models.
"""

from __future__ import annotations

import torch


def value_losses(
    values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, *, clip: float
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """max((V_clipped - R)^2, (V - R)^2), V_clipped = V_old + clamp(V - V_old, -clip, clip); no factor 1/2.

    Source: value clipping of the first implementation of PPO, as described in arXiv:2005.12729, section 3.

    Args:
        values: [T] the critic's, with gradient.
        old_values: [T] the critic's before the first step, from which the returns were made.
        returns: [T] value targets.
        clip: bound on the distance to the old value.

    Returns:
        loss [T], and detached metrics [T]: ``value_loss`` and ``value_clipfrac``, 1.0 where the clip decided.
    """
    bounded = old_values + (values - old_values).clamp(-clip, clip)
    free_loss, bounded_loss = (values - returns).square(), (bounded - returns).square()
    loss = torch.maximum(free_loss, bounded_loss)
    clipped = (bounded_loss > free_loss).to(values.dtype)
    return loss, {"value_loss": loss.detach(), "value_clipfrac": clipped}


def explained_variance(values: torch.Tensor, returns: torch.Tensor) -> float:
    """1 - var(returns - values) / var(returns) over tokens [T]: 1 is perfect, 0 is no better than a constant.

    0.0 where the returns do not vary, of which there is nothing to explain.
    """
    if len(returns) < 2 or bool((returns == returns[0]).all()):
        return 0.0
    return float(1 - torch.var(returns - values) / torch.var(returns))

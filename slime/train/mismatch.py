"""How far engine and trainer disagree about the log-probs of the same tokens.

Invariant: averages use the weights of the loss, so that they do not depend on packing. Pure functions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch


def gap_terms(log_probs: torch.Tensor, rollout_log_probs: torch.Tensor) -> dict[str, torch.Tensor]:
    """Per-token terms [T]; their weighted sums are the arguments of `gap_metrics`.

    Args:
        log_probs: the trainer's, under the weights that sampled the tokens.
        rollout_log_probs: the engine's.
    """
    difference = log_probs - rollout_log_probs
    return {
        "abs_diff": difference.abs(),
        "diff": difference,
        "k3": torch.expm1(difference) - difference,
    }


def gap_metrics(sums: Mapping[str, float], max_abs_diff: float) -> dict[str, float]:
    """Metrics of a step from the weighted sums of `gap_terms`.

    `train_rollout_kl` estimates KL(engine || trainer) by k3; `train_rollout_ppl_ratio` is the trainer's
    perplexity of the sampled tokens over the engine's.
    """
    return {
        "train_rollout_logprob_abs_diff": sums["abs_diff"],
        "train_rollout_logprob_max_diff": max_abs_diff,
        "train_rollout_kl": sums["k3"],
        "train_rollout_ppl_ratio": math.exp(min(-sums["diff"], 700.0)),
    }

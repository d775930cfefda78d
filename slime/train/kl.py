"""Estimators of the divergence from a reference policy, per sampled token.

With d = log pi - log pi_ref of a token sampled from pi. Pure functions on tensors of one shape.
"""

from __future__ import annotations

from typing import Literal, cast

import torch

KlType = Literal["k1", "k2", "k3", "low_var_kl"]
LOW_VAR_BOUND = 10.0


def kl_estimate(
    log_probs: torch.Tensor,
    ref_log_probs: torch.Tensor,
    kind: KlType,
    *,
    importance_ratio: torch.Tensor | None = None,
) -> torch.Tensor:
    """KL(pi || pi_ref) estimate of each token.

    k1 = d; k2 = d^2 / 2; k3 = exp(-d) - 1 + d; low_var_kl = k3 clamped to +-10.
    Source: Schulman, "Approximating KL Divergence" (2020), http://joschu.net/blog/kl-approx.html.

    Args:
        log_probs, ref_log_probs: natural logs, any equal shape.
        importance_ratio: pi / pi_old of the same tokens; multiplying by it makes the estimate unbiased for
            tokens that an older policy sampled.
    """
    difference = log_probs.float() - ref_log_probs.float()
    if kind == "k1":
        estimate = difference
    elif kind == "k2":
        estimate = difference.square() / 2
    else:
        estimate = torch.expm1(-difference) + difference
        if kind == "low_var_kl":
            estimate = estimate.clamp(-LOW_VAR_BOUND, LOW_VAR_BOUND)
    return estimate if importance_ratio is None else estimate * importance_ratio


def kl_type(name: str) -> KlType:
    """`name` as a `KlType`.

    Raises:
        ValueError: not one of the four.
    """
    if name not in ("k1", "k2", "k3", "low_var_kl"):
        raise ValueError(f"KL estimator must be k1, k2, k3 or low_var_kl; got {name!r}")
    return cast(KlType, name)

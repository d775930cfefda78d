"""The policy-gradient loss of each trained token, and the per-token metrics that go with it.

Invariant: every value is per token [T]; aggregation happens elsewhere, by weights. Knows no rows, no models.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from slime.train.kl import KlType, kl_estimate


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoss:
    """The declared terms of the loss.

    Attributes:
        clip_low, clip_high: the ratio is clipped to [1 - clip_low, 1 + clip_high].
        dual_clip: c > 1, bound on the loss of tokens with negative advantage; None is off.
        entropy_coef: weight of the entropy bonus.
        kl_type: estimator of the KL term; None leaves the term out.
        kl_coef: weight of the KL term.
        unbiased_kl: multiply the estimate by the ratio.
        tis: bounds (low, high) of the truncated importance weight; None is off.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    entropy_coef: float = 0.0
    kl_type: KlType | None = None
    kl_coef: float = 0.0
    unbiased_kl: bool = False
    tis: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyTokens:
    """What the loss needs of T trained tokens; every tensor is [T]."""

    log_probs: torch.Tensor
    old_log_probs: torch.Tensor
    advantages: torch.Tensor
    entropy: torch.Tensor
    ref_log_probs: torch.Tensor | None = None
    rollout_log_probs: torch.Tensor | None = None


def policy_losses(tokens: PolicyTokens, loss: PolicyLoss) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss [T] and detached metrics, each [T].

    loss = w * pg - entropy_coef * H + kl_coef * KL, with r = exp(log pi - log pi_old),
    pg = max(-r A, -clip(r) A) (PPO, arXiv:1707.06347, equation 7) and, for A < 0, at most -c A
    (dual clip, arXiv:1912.09729, equation 5).
    """
    log_ratio = tokens.log_probs - tokens.old_log_probs
    ratio = log_ratio.exp()
    pg_loss, clipped = clipped_surrogate(ratio, tokens.advantages, loss)
    metrics = {"pg_clipfrac": clipped, "ppo_kl": -log_ratio}
    if loss.tis is not None:
        weight, weight_metrics = truncated_importance(tokens, loss.tis)
        pg_loss = pg_loss * weight
        metrics |= weight_metrics | {"ois": ratio}
    total = pg_loss
    if loss.entropy_coef:
        total = total - loss.entropy_coef * tokens.entropy
    if loss.kl_type is not None:
        kl = _kl_term(tokens, loss, ratio)
        total = total + loss.kl_coef * kl
        metrics["kl_loss"] = kl
    metrics |= {"loss": total, "pg_loss": pg_loss, "entropy_loss": tokens.entropy}
    return total, {name: value.detach() for name, value in metrics.items()}


def clipped_surrogate(
    ratio: torch.Tensor, advantages: torch.Tensor, loss: PolicyLoss
) -> tuple[torch.Tensor, torch.Tensor]:
    """PPO's pessimistic bound per token, and 1.0 where the clip decided."""
    free = -ratio * advantages
    bounded = -ratio.clamp(1 - loss.clip_low, 1 + loss.clip_high) * advantages
    clipped = (bounded > free).to(ratio.dtype)
    value = torch.maximum(free, bounded)
    if loss.dual_clip is not None:
        value = torch.where(advantages < 0, torch.minimum(value, -loss.dual_clip * advantages), value)
    return value, clipped


def truncated_importance(
    tokens: PolicyTokens, bounds: tuple[float, float]
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Weight pi_old(trainer) / pi(engine) clamped to `bounds`, without gradient, and its metrics.

    Source: truncated importance sampling for the engine-trainer gap, Yao et al. (2025),
    https://fengyao.notion.site/off-policy-rl.

    Raises:
        ValueError: the tokens carry no engine log-probs.
    """
    if tokens.rollout_log_probs is None:
        raise ValueError("truncated importance sampling needs the log-probs of the engine")
    low, high = bounds
    raw = (tokens.old_log_probs - tokens.rollout_log_probs).detach().exp()
    weight = raw.clamp(low, high)
    return weight, {
        "tis": raw,
        "tis_clipfrac": (weight != raw).to(raw.dtype),
        "tis_abs": (raw - 1).abs(),
    }


def _kl_term(tokens: PolicyTokens, loss: PolicyLoss, ratio: torch.Tensor) -> torch.Tensor:
    if tokens.ref_log_probs is None or loss.kl_type is None:
        raise ValueError("the KL term needs the log-probs of the reference model")
    importance = ratio if loss.unbiased_kl else None
    return kl_estimate(tokens.log_probs, tokens.ref_log_probs, loss.kl_type, importance_ratio=importance)

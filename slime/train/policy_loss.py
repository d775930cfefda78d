"""The policy-gradient loss of each trained token, and the per-token metrics that go with it.

Invariant: every value is per token [T]; aggregation happens elsewhere, by weights. Knows no rows, no models.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from slime.train.corrections import CorrectionRule, correction
from slime.train.kl import KlType, kl_estimate

Surrogate = Literal["ppo", "gspo", "cispo"]


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
        correction: a local rule for the gap to the engine; None is off. Factors of other rules come as
            `PolicyTokens.correction`.
        surrogate: what the clip acts on: the token's ratio (``ppo``), the rollout's (``gspo``), or the
            detached factor of log pi (``cispo``).
        opsm_delta: off-policy sequence masking: tokens with negative advantage do not train in rollouts whose
            mean of log pi_old - log pi exceeds this; None is off.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    entropy_coef: float = 0.0
    kl_type: KlType | None = None
    kl_coef: float = 0.0
    unbiased_kl: bool = False
    correction: CorrectionRule | None = None
    surrogate: Surrogate = "ppo"
    opsm_delta: float | None = None

    @property
    def needs_sequence_ratio(self) -> bool:
        """Whether `PolicyTokens.sequence_log_ratio` is read."""
        return self.surrogate == "gspo" or self.opsm_delta is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyTokens:
    """What the loss needs of T trained tokens; every tensor is [T].

    Attributes:
        sequence_log_ratio: mean of log pi - log pi_old over all trained tokens of the token's rollout, under
            the weights that the step starts from (`slime.train.sequence`); a constant. Zero where the step is
            exactly on-policy.
        correction: factor of the policy-gradient term that was settled before packing; a constant.
    """

    log_probs: torch.Tensor
    old_log_probs: torch.Tensor
    advantages: torch.Tensor
    entropy: torch.Tensor
    ref_log_probs: torch.Tensor | None = None
    rollout_log_probs: torch.Tensor | None = None
    sequence_log_ratio: torch.Tensor | None = None
    correction: torch.Tensor | None = None


def policy_losses(tokens: PolicyTokens, loss: PolicyLoss) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss [T] and detached metrics, each [T].

    loss = w * pg - entropy_coef * H + kl_coef * KL, with w the product of the weights and masks that are on.

    * ppo: r = exp(log pi - log pi_old), pg = max(-r A, -clip(r) A) (arXiv:1707.06347, equation 7) and, for
      A < 0, at most -c A (dual clip, arXiv:1912.09729, equation 5).
    * gspo: the same with the rollout's ratio; see `sequence_ratio`.
    * cispo: see `clipped_weight_loss`.

    Raises:
        ValueError: log-probs or the sequence ratio that a declared term needs are missing.
    """
    log_ratio = tokens.log_probs - tokens.old_log_probs
    ratio = log_ratio.exp()
    pg_loss, clipped = _surrogate_loss(tokens, ratio, loss)
    metrics = {"pg_clipfrac": clipped, "ppo_kl": -log_ratio}
    if loss.opsm_delta is not None:
        dropped = off_policy_sequences(tokens, loss.opsm_delta)
        pg_loss = pg_loss.masked_fill(dropped, 0.0)
        metrics["opsm_clipfrac"] = dropped.to(ratio.dtype)
    if loss.correction is not None:
        factors, factor_metrics = local_correction(tokens, loss.correction)
        pg_loss = pg_loss * factors
        metrics |= {**factor_metrics} | {"ois": ratio}
    if tokens.correction is not None:
        pg_loss = pg_loss * tokens.correction
    total = pg_loss
    if loss.entropy_coef:
        total = total - loss.entropy_coef * tokens.entropy
    if loss.kl_type is not None:
        kl = _kl_term(tokens, loss, ratio)
        total = total + loss.kl_coef * kl
        metrics["kl_loss"] = kl
    metrics |= {"loss": total, "pg_loss": pg_loss, "entropy_loss": tokens.entropy}
    return total, {name: value.detach() for name, value in metrics.items()}


def _surrogate_loss(
    tokens: PolicyTokens, ratio: torch.Tensor, loss: PolicyLoss
) -> tuple[torch.Tensor, torch.Tensor]:
    if loss.surrogate == "cispo":
        return clipped_weight_loss(ratio, tokens.log_probs, tokens.advantages, loss)
    if loss.surrogate == "gspo":
        ratio = sequence_ratio(tokens)
    return clipped_surrogate(ratio, tokens.advantages, loss)


def sequence_ratio(tokens: PolicyTokens) -> torch.Tensor:
    """GSPO: s = exp(mean over the rollout of log pi - log pi_old) at each token, sg(s) pi_t / sg(pi_t).

    Its gradient is s grad log pi_t, so that the mean over the rollout's tokens of a loss of it has the
    gradient of that loss of s itself, in whatever micro-batches the tokens are. With advantages that differ
    inside the rollout it is GSPO-token. Source: arXiv:2507.18071, equations 7 and 14.
    """
    value = _needed(tokens.sequence_log_ratio, "GSPO needs the mean log-ratio of the rollouts").detach()
    return (value + tokens.log_probs - tokens.log_probs.detach()).exp()


def clipped_weight_loss(
    ratio: torch.Tensor, log_probs: torch.Tensor, advantages: torch.Tensor, loss: PolicyLoss
) -> tuple[torch.Tensor, torch.Tensor]:
    """CISPO: -sg(clip(r)) A log pi per token, and 1.0 where the weight was clipped.

    Every token keeps a gradient. Source: MiniMax-M1, arXiv:2506.13585, equations 4 and 5.
    """
    weight = ratio.detach().clamp(1 - loss.clip_low, 1 + loss.clip_high)
    return -weight * advantages * log_probs, (weight != ratio.detach()).to(ratio.dtype)


def off_policy_sequences(tokens: PolicyTokens, delta: float) -> torch.Tensor:
    """True [T] where A < 0 and the rollout's mean of log pi_old - log pi exceeds `delta`.

    Source: off-policy sequence masking of DeepSeek-V3.2, arXiv:2512.02556.
    """
    mean = _needed(tokens.sequence_log_ratio, "off-policy masking needs the mean log-ratio of the rollouts")
    return (tokens.advantages < 0) & (-mean > delta)


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


def local_correction(
    tokens: PolicyTokens, rule: CorrectionRule
) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
    """Factors [T] of a local rule, without gradient, and its metrics; see `slime.train.corrections`.

    Raises:
        ValueError: the tokens carry no engine log-probs, or the rule is not local.
    """
    if not rule.is_local:
        raise ValueError("a correction that looks beyond the token is settled before packing")
    engine = _needed(tokens.rollout_log_probs, "the correction needs the log-probs of the engine")
    gap = tokens.old_log_probs - engine
    found = correction(gap, torch.zeros_like(gap, dtype=torch.long), rule)
    return found.factors, found.metrics


def _kl_term(tokens: PolicyTokens, loss: PolicyLoss, ratio: torch.Tensor) -> torch.Tensor:
    if tokens.ref_log_probs is None or loss.kl_type is None:
        raise ValueError("the KL term needs the log-probs of the reference model")
    importance = ratio if loss.unbiased_kl else None
    return kl_estimate(tokens.log_probs, tokens.ref_log_probs, loss.kl_type, importance_ratio=importance)


def _needed(tensor: torch.Tensor | None, message: str) -> torch.Tensor:
    if tensor is None:
        raise ValueError(message)
    return tensor

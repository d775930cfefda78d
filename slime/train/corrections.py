"""Correction of the gap between engine and trainer: importance weights and rejection of tokens and rollouts.

Invariant: sequence levels are the rollout's, over all its trained tokens; weights and rejections change
numerators only, never the denominators of the loss. Knows log-ratios and ids; knows no loss.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from slime.train.batch import TrainSample
from slime.train.sequence import rollout_sums
from slime.train.stream import RowValues, TokenStream

Level = Literal["token", "sequence", "geometric"]
Mode = Literal["truncate", "clip", "mask"]
# exp(20) is past any bound in use, and finite in float32; products over a long rollout are not.
_LOG_BOUND = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Weighting:
    """How the ratio rho = pi_old(trainer) / pi(engine) becomes a weight.

    Attributes:
        level: rho of the token; ``sequence``: product over the rollout; ``geometric``: its geometric mean.
        mode: ``truncate``: at most `high`; ``clip``: within [low, high]; ``mask``: 0 outside of [low, high].
        normalise: divide by the batch's mean weight: over tokens at token level, over rollouts otherwise.
    """

    level: Level = "token"
    mode: Mode = "truncate"
    low: float = 0.0
    high: float = 2.0
    normalise: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejection:
    """What does not train at all because engine and trainer are too far apart.

    Attributes:
        level: as in `Weighting`; what is rejected is the token, or the whole rollout.
        low, high: rho outside of [low, high] rejects.
        veto: a rollout with any token whose rho is below this is rejected whole; None is off.
    """

    level: Level = "token"
    low: float = 0.5
    high: float = 2.0
    veto: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectionRule:
    """What a run declares: weights, rejection, or both."""

    weighting: Weighting | None = None
    rejection: Rejection | None = None

    @property
    def is_local(self) -> bool:
        """Whether a token's factor depends on that token alone, so that any micro-batch can find it."""
        weighting, rejection = self.weighting, self.rejection
        weight_is_local = weighting is None or (weighting.level == "token" and not weighting.normalise)
        return weight_is_local and (
            rejection is None or (rejection.level == "token" and rejection.veto is None)
        )


ICEPOP = Weighting(level="token", mode="mask", low=0.5, high=5.0)
"""IcePop: double-sided masking with the bounds of its authors (arXiv:2510.18855)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """Factor of each trained token's policy-gradient term, and how it came about.

    Attributes:
        factors: [T] weight, 0.0 where rejected; without gradient.
        metrics: [T] each, for averages with the weights of the loss: ``tis`` (rho at the level of the
            weight), ``tis_clipfrac`` (a bound changed it), ``tis_abs`` (|rho - 1|), ``rs_frac`` and
            ``veto_frac`` (rejected by bounds, by veto).
    """

    factors: torch.Tensor
    metrics: Mapping[str, torch.Tensor]


def correction(log_ratio: torch.Tensor, rollouts: torch.Tensor, rule: CorrectionRule) -> Correction:
    """Importance weights and rejections of a batch.

    A rule that is not local looks beyond the token: give it all trained tokens of the step at once, before
    anything is packed.

    Sources: truncated importance sampling, https://fengyao.notion.site/off-policy-rl; masked importance
    sampling, sequence and geometric levels, rejection and veto, Liu et al. (2025), "When Speed Kills
    Stability"; IcePop, arXiv:2510.18855.

    Args:
        log_ratio: [T] log pi_old(trainer) - log pi(engine).
        rollouts: [T] rollout id of each token; not read by a local rule.
    """
    log_ratio, weighting, rejection = log_ratio.detach(), rule.weighting, rule.rejection
    level = weighting.level if weighting is not None else "token"
    raw = level_ratio(log_ratio, rollouts, level)
    weight = torch.ones_like(raw) if weighting is None else bounded(raw, weighting)
    metrics = {
        "tis": raw,
        "tis_clipfrac": (weight != raw).to(raw.dtype) if weighting is not None else torch.zeros_like(raw),
        "tis_abs": (raw - 1).abs(),
    }
    if weighting is not None and weighting.normalise:
        weight = weight / _batch_mean(weight, rollouts, weighting.level)
    if rejection is not None:
        rejected, vetoed = rejections(log_ratio, rollouts, rejection)
        weight = weight.masked_fill(rejected | vetoed, 0.0)
        metrics |= {"rs_frac": rejected.to(raw.dtype), "veto_frac": vetoed.to(raw.dtype)}
    return Correction(factors=weight, metrics=metrics)


def step_corrections(
    samples: Sequence[TrainSample],
    old_log_probs: RowValues,
    weights: Mapping[int, float],
    rule: CorrectionRule,
) -> tuple[dict[int, torch.Tensor], dict[str, float]]:
    """Factors by sample index, [response_length] each, and metrics of one optimizer step.

    Args:
        samples: all rows of the step, with the engine's log-probs.
        old_log_probs: the trainer's, under the policy that sampled, by sample index.
        weights: of the rows in the loss (`row_weights`); the metrics are averaged with them.

    Raises:
        DataError: log-probs that are missing or do not fit; names rollout, sample and lengths.
    """
    stream = TokenStream.of(samples)
    recorded = {s.index: s.rollout_log_probs for s in samples if s.rollout_log_probs is not None}
    gap = stream.gather("old log-probs", old_log_probs) - stream.gather("engine log-probs", recorded)
    found = correction(gap, stream.rollout_of, rule)
    share = stream.spread(weights)
    share = share / share.sum()
    metrics = {name: float(value @ share) for name, value in found.metrics.items()} if len(share) else {}
    return stream.scatter(found.factors), metrics


def level_ratio(log_ratio: torch.Tensor, rollouts: torch.Tensor, level: Level) -> torch.Tensor:
    """rho [T] at a level: of the token, or of its rollout; its logarithm is kept within +-20."""
    if level != "token":
        sums, counts, places = rollout_sums(log_ratio, rollouts)
        values = sums / counts if level == "geometric" else sums
        log_ratio = values[places].to(log_ratio.dtype)
    return log_ratio.clamp(-_LOG_BOUND, _LOG_BOUND).exp()


def bounded(ratio: torch.Tensor, weighting: Weighting) -> torch.Tensor:
    """The weights that the mode makes of the ratios."""
    if weighting.mode == "truncate":
        return ratio.clamp(max=weighting.high)
    if weighting.mode == "clip":
        return ratio.clamp(weighting.low, weighting.high)
    return ratio.masked_fill((ratio < weighting.low) | (ratio > weighting.high), 0.0)


def rejections(
    log_ratio: torch.Tensor, rollouts: torch.Tensor, rejection: Rejection
) -> tuple[torch.Tensor, torch.Tensor]:
    """True [T] where the bounds reject, and where the veto does."""
    ratio = level_ratio(log_ratio, rollouts, rejection.level)
    rejected = (ratio < rejection.low) | (ratio > rejection.high)
    if rejection.veto is None:
        return rejected, torch.zeros_like(rejected)
    catastrophic = level_ratio(log_ratio, rollouts, "token") < rejection.veto
    found, _, places = rollout_sums(catastrophic, rollouts)
    return rejected, found[places] > 0


def _batch_mean(weight: torch.Tensor, rollouts: torch.Tensor, level: Level) -> torch.Tensor:
    """Mean over tokens or rollouts; 1 where every weight is 0."""
    if level == "token":
        mean = weight.double().mean()
    else:
        sums, counts, _ = rollout_sums(weight, rollouts)
        mean = (sums / counts).mean()
    return torch.where(mean > 0, mean, torch.ones_like(mean)).to(weight.dtype)

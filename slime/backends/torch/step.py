"""The token tensors of a micro-batch of step rows, and the metrics summed over a step.

Invariant: only tokens with mask 1 become tensors, so nothing else can have a gradient; every average is
weighted like the loss. Knows rows and tensors; knows no model and no optimizer.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from slime.backends.base import StepRow
from slime.errors import DataError
from slime.train.mismatch import gap_metrics, gap_terms
from slime.train.policy_loss import PolicyLoss, PolicyTokens


@dataclass(frozen=True, slots=True)
class StepTokens:
    """Trained tokens [T] of a micro-batch, rows after one another.

    Attributes:
        weight: each token's factor in the loss.
        comparable: True where the engine's log-prob is known, and the policy is the one that the engine had.
    """

    policy: PolicyTokens
    weight: torch.Tensor
    comparable: torch.Tensor

    @classmethod
    def of(cls, rows: Sequence[StepRow], log_probs: torch.Tensor, entropy: torch.Tensor) -> StepTokens:
        """Gather what the rows say about their trained tokens."""
        device = log_probs.device

        def column(values: Sequence[Sequence[float] | None]) -> torch.Tensor:
            flat = [
                value
                for row, per_token in zip(rows, values, strict=True)
                for value, mask in zip(_or_nan(per_token, row), row.sample.loss_mask, strict=True)
                if mask
            ]
            return torch.tensor(flat, dtype=torch.float32, device=device)

        given = column([row.old_log_probs for row in rows])
        current = log_probs.detach()
        reference = column([row.ref_log_probs for row in rows])
        rollout = column([row.sample.rollout_log_probs for row in rows])
        policy = PolicyTokens(
            log_probs=log_probs,
            old_log_probs=torch.where(given.isnan(), current, given),
            advantages=column([row.advantages for row in rows]),
            entropy=entropy,
            ref_log_probs=reference,
            rollout_log_probs=rollout,
            sequence_log_ratio=column(
                [[row.sequence_log_ratio] * row.sample.response_length for row in rows]
            ),
            correction=column([row.correction for row in rows]).nan_to_num(nan=1.0),
        )
        weight = column([[row.weight] * row.sample.response_length for row in rows])
        stale = column([[float(row.stale)] * row.sample.response_length for row in rows])
        return cls(policy, weight, ~rollout.isnan() & (stale == 0))


class StepSums:
    """Weighted sums of the per-token metrics of a step."""

    def __init__(self, *, gap_from_old: bool) -> None:
        """`gap_from_old`: given old log-probs are the trainer's, and measure the gap to the engine."""
        self._gap_from_old = gap_from_old
        self._sums: dict[str, float] = defaultdict(float)
        self._gap_sums: dict[str, float] = defaultdict(float)
        self._gap_weight = 0.0
        self._gap_max = 0.0
        self._tokens = 0
        self._computed = 0

    def add(self, tokens: StepTokens, metrics: Mapping[str, torch.Tensor], *, computed: int) -> None:
        """Take a micro-batch: its metrics [T], and the number of tokens that the model computed."""
        self._tokens += len(tokens.weight)
        self._computed += computed
        _add_weighted(self._sums, metrics, tokens.weight)
        if not bool(tokens.comparable.any()):
            return
        ours = tokens.policy.old_log_probs if self._gap_from_old else tokens.policy.log_probs.detach()
        engine = tokens.policy.rollout_log_probs
        assert engine is not None
        terms = gap_terms(ours[tokens.comparable], engine[tokens.comparable])
        weight = tokens.weight[tokens.comparable]
        _add_weighted(self._gap_sums, terms, weight)
        self._gap_weight += weight.sum().item()
        self._gap_max = max(self._gap_max, terms["abs_diff"].max().item())

    @classmethod
    def total(cls, parts: Sequence[StepSums]) -> StepSums:
        """The sums of a step whose rows were added to several."""
        total = cls(gap_from_old=parts[0]._gap_from_old)
        for part in parts:
            for sums, others in ((total._sums, part._sums), (total._gap_sums, part._gap_sums)):
                for name, value in others.items():
                    sums[name] += value
            total._gap_weight += part._gap_weight
            total._gap_max = max(total._gap_max, part._gap_max)
            total._tokens += part._tokens
            total._computed += part._computed
        return total

    def metrics(self) -> dict[str, float]:
        """Averages of the step, weighted like the loss."""
        found = dict(self._sums) | {"tokens": float(self._tokens), "computed_tokens": float(self._computed)}
        if self._gap_weight:
            means = {name: value / self._gap_weight for name, value in self._gap_sums.items()}
            found |= gap_metrics(means, self._gap_max)
        return found


def has_gradient(row: StepRow, loss: PolicyLoss) -> bool:
    """Whether the row's loss can have a gradient: an advantage that counts, or a term that needs none."""
    if loss.entropy_coef or (loss.kl_type is not None and loss.kl_coef):
        return True
    factors = row.correction or row.sample.loss_mask
    terms = zip(row.advantages, factors, row.sample.loss_mask, strict=True)
    return any(advantage and factor and mask for advantage, factor, mask in terms)


def check_rows(rows: Sequence[StepRow], loss: PolicyLoss) -> None:
    """Check every per-token list of every row.

    Raises:
        DataError: naming sample, field and lengths.
    """
    for row in rows:
        sample = row.sample
        if not sample.prompt_length:
            raise DataError("the response has no token before it", place=f"sample {sample.index}")
        lists = {
            "loss_mask": sample.loss_mask,
            "rollout_log_probs": sample.rollout_log_probs,
            "advantages": row.advantages,
            "old_log_probs": row.old_log_probs,
            "ref_log_probs": row.ref_log_probs,
            "correction": row.correction,
        }
        for name, values in lists.items():
            if values is not None and len(values) != sample.response_length:
                raise DataError(
                    f"{name} has length {len(values)}, the response has {sample.response_length} tokens",
                    place=f"sample {sample.index}",
                )
        needed = {"rollout_log_probs": loss.correction is not None, "ref_log_probs": loss.kl_type is not None}
        for name, is_needed in needed.items():
            if is_needed and lists[name] is None:
                raise DataError(f"the loss needs {name}", place=f"sample {sample.index}")
        numbers = [row.weight, row.sequence_log_ratio, *row.advantages, *(row.correction or ())]
        if not all(map(math.isfinite, numbers)):
            raise DataError("weight, advantages or correction are not finite", place=f"sample {sample.index}")


def _or_nan(values: Sequence[float] | None, row: StepRow) -> Sequence[float]:
    return values if values is not None else [math.nan] * row.sample.response_length


def _add_weighted(sums: dict[str, float], terms: Mapping[str, torch.Tensor], weight: torch.Tensor) -> None:
    names = list(terms)
    values = torch.stack([terms[name].float() for name in names]) @ weight
    for name, value in zip(names, values.tolist(), strict=True):
        sums[name] += value

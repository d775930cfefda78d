"""The user's loss: called with the logits of each micro-batch in place of the policy loss.

Invariant: the loss of a step is the sum over micro-batches of what the function returns, divided by the
step's rollouts; `sum_of_sample_mean` weighs rows as the flags say, so a loss made of it does not depend on
packing. Knows rows and a model; knows no policy loss.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch

from slime.backends.base import StepRow
from slime.backends.hooks import tensor_of_answer
from slime.backends.torch.batches import MicroBatches
from slime.backends.torch.forest import PackedBatch, Request
from slime.backends.torch.ranks import summed
from slime.train.rewards import total_reward
from slime.utils.routes import UNKNOWN
from slime.utils.user_function import UserFunction

LogitsOf: TypeAlias = Callable[[PackedBatch], torch.Tensor]
"""Logits [T, V] of the requested predictions of a packed batch."""


@dataclass(frozen=True, slots=True)
class CustomLoss:
    """``--custom-loss-function-path``: ``(args, batch, logits, sum_of_sample_mean) -> (loss, metrics)``.

    `batch` holds one entry a row in every list: ``unconcat_tokens``, ``total_lengths``, ``response_lengths``,
    ``loss_masks``, ``advantages``, ``log_probs`` (of the old policy), ``rollout_ids``, ``sample_indices``,
    ``raw_reward``, and where they exist ``ref_log_probs`` and ``rollout_log_probs``; ``tokens`` is [1, T],
    rows after one another. `logits` are [1, T, V] float32, not divided by the temperature. `metrics` are
    numbers, summed and divided like the loss.
    """

    hook: UserFunction
    args: Any

    def backward(
        self, rows: Sequence[StepRow], logits_of: LogitsOf, batches: MicroBatches
    ) -> dict[str, float]:
        """Gradients of the loss of a step, of all ranks' rows together, and its metrics.

        Raises:
            HookError: the function raised, or returned something else than a finite number with a gradient
                and a dict of numbers; names it, and the samples with their lengths.
        """
        rollouts = len({row.sample.rollout_id for row in rows})
        requests = [(i, _whole_row(row)) for i, row in enumerate(rows)]
        sums: dict[str, float] = {"loss": 0.0}
        for members, packed in batches.pack(requests):
            chosen, logits = [rows[i] for i in members], logits_of(packed)
            if not chosen:  # another rank has rows left, and this one takes part in its collectives
                logits.sum().backward()  # type: ignore[no-untyped-call]
                continue
            loss, metrics = self._call(logits, chosen, rollouts)
            (loss / rollouts).backward()  # type: ignore[no-untyped-call]
            for name, value in {**metrics, "loss": loss.item()}.items():
                sums[name] = sums.get(name, 0.0) + value / rollouts
        return summed(batches.ranks.gather(sums)) | {
            "tokens": float(sum(row.sample.trained_tokens for row in rows))
        }

    def _call(
        self, logits: torch.Tensor, rows: Sequence[StepRow], rollouts: int
    ) -> tuple[torch.Tensor, dict[str, float]]:
        weights = _token_weights(rows, logits.device) * rollouts

        def sum_of_sample_mean(values: torch.Tensor) -> torch.Tensor:
            flat = values.reshape(-1)
            if flat.shape != weights.shape:
                raise self.hook.broke(
                    f"gave sum_of_sample_mean {len(flat)} values; {_names(rows)} have {len(weights)} "
                    "response tokens"
                )
            return (flat * weights).sum()

        batch = _loss_batch(rows, logits.device)
        answer = self.hook(self.args, batch, logits[None], sum_of_sample_mean)
        return self._checked(answer, rows)

    def _checked(self, answer: Any, rows: Sequence[StepRow]) -> tuple[torch.Tensor, dict[str, float]]:
        if not isinstance(answer, tuple | list) or len(answer) != 2 or not isinstance(answer[1], dict):
            raise self.hook.broke(f"returned {type(answer).__name__}, expected (loss, metrics)")
        loss = answer[0]
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
            found = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise self.hook.broke(
                f"returned a loss of {found}, expected one number with a gradient, for {_names(rows)}"
            )
        if not bool(torch.isfinite(loss)):
            raise self.hook.broke(f"returned the loss {loss.item()} for {_names(rows)}")
        return loss.reshape(()), {name: self._number(name, value) for name, value in answer[1].items()}

    def _number(self, name: str, value: Any) -> float:
        found = tensor_of_answer(self.hook, f"metric {name!r}", value)
        if found.numel() != 1:
            raise self.hook.broke(f"metric {name!r} has shape {tuple(found.shape)}, expected one number")
        return float(found)


def _whole_row(row: StepRow) -> Request:
    """Asks for a prediction behind every token; that behind the last one has no target, any id stands."""
    tokens, routes = row.sample.tokens, row.sample.routed_experts
    if routes is not None:
        routes = np.pad(routes, ((0, 1), (0, 0), (0, 0)), constant_values=UNKNOWN)
    return Request((*tokens, 0), tuple(range(1, len(tokens) + 1)), routes)


def _loss_batch(rows: Sequence[StepRow], device: torch.device) -> dict[str, Any]:
    samples = [row.sample for row in rows]
    batch: dict[str, Any] = {
        "unconcat_tokens": [torch.tensor(s.tokens, device=device) for s in samples],
        "total_lengths": [len(s.tokens) for s in samples],
        "response_lengths": [s.response_length for s in samples],
        "loss_masks": [torch.tensor(s.loss_mask, device=device) for s in samples],
        "rollout_ids": [s.rollout_id for s in samples],
        "sample_indices": [s.index for s in samples],
        "raw_reward": [total_reward(s.reward) if s.raw_reward is None else s.raw_reward for s in samples],
    }
    batch["tokens"] = torch.cat(batch["unconcat_tokens"])[None]
    for name, values in (
        ("advantages", [row.advantages for row in rows]),
        ("log_probs", [row.old_log_probs for row in rows]),
        ("ref_log_probs", [row.ref_log_probs for row in rows]),
        ("rollout_log_probs", [s.rollout_log_probs for s in samples]),
    ):
        if all(value is not None for value in values):
            batch[name] = [torch.tensor(value, device=device) for value in values]
    return batch


def _token_weights(rows: Sequence[StepRow], device: torch.device) -> torch.Tensor:
    """Factor of every response token of the rows; 0 where it does not train."""
    return torch.tensor([row.weight * mask for row in rows for mask in row.sample.loss_mask], device=device)


def _names(rows: Sequence[StepRow]) -> str:
    listed = [f"sample {row.sample.index} ({row.sample.response_length} response tokens)" for row in rows[:3]]
    return ", ".join(listed) + (" ..." if len(rows) > 3 else "")

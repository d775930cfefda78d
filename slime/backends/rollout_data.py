"""What the user's advantage function sees, ``rollout_data``, and what it gave back.

Invariant: rows that train only, in the order of their index, with their ids; its result is one list of
numbers a row, checked by name. Knows rows and log-probs; knows no loss and no trainer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from slime.backends.hooks import rows_of_answer
from slime.train.advantages import Estimator, TokenInputs, token_advantages
from slime.train.batch import TrainSample
from slime.train.kl import kl_estimate
from slime.train.rewards import token_rewards, total_reward
from slime.train.stream import RowValues, TokenStream
from slime.utils.user_function import UserFunction


def hooked_inputs(
    samples: Sequence[TrainSample],
    estimator: Estimator,
    inputs: TokenInputs,
    hook: UserFunction,
    args: Any,
) -> TokenInputs:
    """`inputs` with the advantages, and returns if it set any, of the user's function.

    The function is called as ``(args, rollout_data)`` once a rollout step and sets
    ``rollout_data["advantages"]``, and ``["returns"]`` for a critic: a list of one tensor a row,
    [response_length]. Rows of one rollout share their ``rollout_ids`` entry.

    Raises:
        HookError: it raised, set nothing, or lists of another shape or not finite; names hook, sample and
            lengths.
    """
    rows = trained_rows(samples)
    data = rollout_data(rows, samples, estimator, inputs)
    hook(args, data)
    lengths = [sample.response_length for sample in rows]
    places = [place_of(sample) for sample in rows]

    def answer(name: str) -> RowValues:
        found = rows_of_answer(hook, name, data[name], places, lengths)
        return {sample.index: values for sample, values in zip(rows, found, strict=True)}

    if "advantages" not in data:
        raise hook.broke(
            'did not set rollout_data["advantages"]', "set a list of one tensor [response_length] a row"
        )
    returns = answer("returns") if data.get("returns") is not None else None
    if returns is None and estimator.name == "ppo":
        raise hook.broke(
            'did not set rollout_data["returns"], which the critic learns from',
            "set it like the advantages: a list of one tensor [response_length] a row",
        )
    return replace(inputs, advantages=answer("advantages"), returns=returns)


def trained_rows(samples: Sequence[TrainSample]) -> list[TrainSample]:
    """The rows that hooks see: those with a token that trains, rollouts by id, their rows by index."""
    return [sample for sample in TokenStream.of(samples).rows if sample.trained_tokens]


def place_of(sample: TrainSample) -> str:
    """A row in errors."""
    return f"sample {sample.index} of rollout {sample.rollout_id}"


def rollout_data(
    rows: Sequence[TrainSample], samples: Sequence[TrainSample], estimator: Estimator, inputs: TokenInputs
) -> dict[str, Any]:
    """The dict that the function gets: one entry a row in every list.

    ``rewards`` are normalised by group as the flags say, ``raw_reward`` are as given (before a hook shaped
    them), ``token_rewards`` are where they fall. Per-token entries: ``loss_masks``, ``log_probs`` (the
    trainer's), ``rollout_log_probs``, and where they exist ``ref_log_probs``, ``teacher_log_probs``,
    ``values``; ``kl`` to the reference, zero without one.
    """
    plain = replace(estimator, kl_coef=0.0, distillation_coef=0.0, whiten=False, name="grpo")
    normalised = token_advantages(samples, plain).advantages
    stream = TokenStream.of(samples)
    placed = {
        sample.index: values
        for siblings in stream.rollouts.values()
        for sample, values in zip(siblings, token_rewards(siblings), strict=True)
    }
    data: dict[str, Any] = {
        "tokens": [torch.tensor(row.tokens) for row in rows],
        "total_lengths": [len(row.tokens) for row in rows],
        "response_lengths": [row.response_length for row in rows],
        "loss_masks": [torch.tensor(row.loss_mask) for row in rows],
        "rollout_ids": [row.rollout_id for row in rows],
        "group_indices": [row.group_index for row in rows],
        "sample_indices": [row.index for row in rows],
        "rewards": [_trained_mean(row, normalised[row.index]) for row in rows],
        "raw_reward": [
            total_reward(row.reward) if row.raw_reward is None else row.raw_reward for row in rows
        ],
        "token_rewards": [torch.tensor(placed[row.index]) for row in rows],
        "kl": _kl(rows, inputs, estimator),
    }
    engine = {row.index: row.rollout_log_probs for row in rows if row.rollout_log_probs is not None}
    for name, values in (
        ("log_probs", inputs.log_probs),
        ("rollout_log_probs", engine),
        ("ref_log_probs", inputs.ref_log_probs),
        ("teacher_log_probs", inputs.teacher_log_probs),
        ("values", inputs.values),
    ):
        if values is not None and all(row.index in values for row in rows):
            data[name] = [torch.as_tensor(values[row.index], dtype=torch.float32) for row in rows]
    return data


def _trained_mean(row: TrainSample, values: torch.Tensor) -> float:
    """Of equal values, that value: `rewards` of rollouts with one number are exact."""
    kept = values[torch.tensor(row.loss_mask, dtype=torch.bool)]
    return float(kept[0] + (kept - kept[0]).mean())


def _kl(rows: Sequence[TrainSample], inputs: TokenInputs, estimator: Estimator) -> list[torch.Tensor]:
    if not inputs.ref_log_probs or not inputs.log_probs:
        return [torch.zeros(row.response_length) for row in rows]
    ours, reference = inputs.log_probs, inputs.ref_log_probs
    return [
        kl_estimate(
            torch.as_tensor(ours[row.index]), torch.as_tensor(reference[row.index]), estimator.kl_type
        )
        for row in rows
    ]

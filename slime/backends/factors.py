"""Factors of the policy-gradient term that look beyond the token, settled over the whole step before packing.

They come from a correction rule that is not local, from the user's correction, and from the user's reducer.
Invariant: hooks see each rollout as one sequence of its trained tokens, once a step, so no cut, order or
micro-batch changes what they do; what they return must be linear in the loss, which is checked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from slime.backends.hooks import TrainHooks, rows_of_answer, tensor_of_answer
from slime.config.training_sections import AlgorithmConfig
from slime.train.batch import TrainSample
from slime.train.corrections import CorrectionRule, Level, Mode, Rejection, Weighting, step_corrections
from slime.train.stream import RowValues, TokenStream
from slime.utils.user_function import UserFunction

_LINEAR = 1e-4
Factors = Mapping[int, tuple[float, ...]]
"""By sample index, one a response token."""


def correction_rule(algorithm: AlgorithmConfig) -> CorrectionRule | None:
    """The rule that the flags declare, or None; a hook of the user's own replaces it."""
    if algorithm.custom_tis_function_path or not (algorithm.use_tis or algorithm.use_rs):
        return None
    weighting = Weighting(
        level=cast(Level, algorithm.tis_level),
        mode=cast(Mode, algorithm.tis_mode),
        low=algorithm.tis_clip_low,
        high=algorithm.tis_clip,
        normalise=algorithm.tis_batch_normalize,
    )
    rejection = Rejection(
        level=cast(Level, algorithm.rs_level),
        low=algorithm.rs_lower_bound,
        high=algorithm.rs_upper_bound,
        veto=algorithm.rs_veto_threshold,
    )
    return CorrectionRule(
        weighting=weighting if algorithm.use_tis else None,
        rejection=rejection if algorithm.use_rs else None,
    )


def needs_trainer_log_probs(algorithm: AlgorithmConfig, hooks: TrainHooks) -> bool:
    """Whether `step_factors` needs the trainer's log-probs of all rows, on-policy ones too."""
    rule = correction_rule(algorithm)
    return hooks.tis is not None or (rule is not None and not rule.is_local)


def step_factors(
    step: Sequence[TrainSample],
    log_probs: RowValues,
    weights: Mapping[int, float],
    algorithm: AlgorithmConfig,
    hooks: TrainHooks,
) -> tuple[Factors, dict[str, float]]:
    """Factors by sample index (empty where there are none), and metrics of the step.

    Args:
        step: all rows of the step; those that train carry the engine's log-probs, where a correction is on.
        log_probs: the trainer's, under the policy that sampled; see `needs_trainer_log_probs`.
        weights: of the rows in the loss.

    Raises:
        HookError: a hook raised, or broke its contract; names the hook, and rollout and lengths.
        DataError: log-probs that are missing or do not fit; names rollout, sample and lengths.
    """
    stream, rule = TokenStream.of(step), correction_rule(algorithm)
    factors: torch.Tensor | None = None
    metrics: dict[str, float] = {}
    if hooks.tis is not None:
        factors, metrics = _hooked_correction(stream, log_probs, weights, hooks.tis, hooks.args)
    elif rule is not None and not rule.is_local:
        found, metrics = step_corrections(step, log_probs, weights, rule)
        factors = stream.gather("corrections", found)
    if hooks.reducer is not None:
        reduced = _reducer_weights(stream, hooks.reducer, algorithm.calculate_per_token_loss)
        ratio = reduced / stream.spread(weights)
        factors = ratio if factors is None else factors * ratio
    if factors is None:
        return {}, metrics
    return {index: tuple(row.tolist()) for index, row in stream.scatter(factors).items()}, metrics


@dataclass(frozen=True, slots=True)
class _Sequences:
    """The rollouts of a step that train, as hooks see them: trained tokens only, rows joined."""

    places: list[str]
    lengths: list[int]
    total_lengths: list[int]

    @classmethod
    def of(cls, stream: TokenStream) -> _Sequences:
        pairs = zip(stream.rollouts.items(), stream.lengths.tolist(), strict=True)
        found = [(rollout, rows[0].prompt_length, length) for (rollout, rows), length in pairs if length]
        return cls(
            [f"rollout {rollout}" for rollout, _, _ in found],
            [length for _, _, length in found],
            [prompt + length for _, prompt, length in found],
        )

    def masks(self) -> list[torch.Tensor]:
        return [torch.ones(length) for length in self.lengths]

    def split(self, values: torch.Tensor) -> list[torch.Tensor]:
        return list(torch.split(values.float(), self.lengths))


def _hooked_correction(
    stream: TokenStream, log_probs: RowValues, weights: Mapping[int, float], hook: UserFunction, args: Any
) -> tuple[torch.Tensor, dict[str, float]]:
    """What the hook makes of a loss of ones, [T]."""
    shapes = _Sequences.of(stream)
    ours = stream.gather("old log-probs", log_probs)
    recorded = {s.index: s.rollout_log_probs for s in stream.rows if s.rollout_log_probs is not None}
    engine = stream.gather("engine log-probs", recorded)

    def call(pg_loss: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
        answer = hook(
            args,
            pg_loss=pg_loss.clone(),
            train_log_probs=shapes.split(ours),
            rollout_log_probs=shapes.split(engine),
            loss_masks=shapes.masks(),
            total_lengths=list(shapes.total_lengths),
            response_lengths=list(shapes.lengths),
        )
        return _checked_correction(hook, answer, shapes)

    if not shapes.lengths:
        return torch.zeros(0, dtype=torch.float64), {}
    ones = torch.ones(len(ours))
    factors, metrics = call(ones)
    probe = _probe(ones)
    _check_linear(hook, call(probe)[0], factors * probe.double())
    share = stream.spread(weights)
    share = share / share.sum()
    return factors, {name: _mean_metric(hook, name, value, share, shapes) for name, value in metrics.items()}


def _checked_correction(
    hook: UserFunction, answer: Any, shapes: _Sequences
) -> tuple[torch.Tensor, dict[str, Any]]:
    if not isinstance(answer, tuple | list) or len(answer) != 3 or not isinstance(answer[2], dict):
        raise hook.broke(
            f"returned {type(answer).__name__}, expected (pg_loss, masks, metrics)",
            "return the loss [tokens], one mask a sequence, and a dict of metrics",
        )
    loss = tensor_of_answer(hook, "pg_loss", answer[0])
    if tuple(loss.shape) != (sum(shapes.lengths),):
        raise hook.broke(
            f"returned pg_loss of shape {tuple(loss.shape)}, expected ({sum(shapes.lengths)},): "
            f"{shapes.places[0]} ... {shapes.places[-1]} of {shapes.lengths} tokens"
        )
    rows_of_answer(hook, "pg_loss", shapes.split(loss), shapes.places, shapes.lengths)
    masks = rows_of_answer(hook, "masks", answer[1], shapes.places, shapes.lengths)
    return loss * torch.cat(masks), answer[2]


def _mean_metric(hook: UserFunction, name: str, value: Any, share: torch.Tensor, shapes: _Sequences) -> float:
    """A metric of one number, or of one a token, averaged like the loss."""
    if isinstance(value, list | tuple):
        return float(torch.cat(rows_of_answer(hook, name, value, shapes.places, shapes.lengths)) @ share)
    found = tensor_of_answer(hook, f"metric {name!r}", value)
    if found.numel() == 1:
        return float(found)
    if found.shape != share.shape:
        raise hook.broke(
            f"metric {name!r} has shape {tuple(found.shape)}, expected one number or {len(share)} tokens"
        )
    return float(found @ share)


def _reducer_weights(stream: TokenStream, hook: UserFunction, per_token: bool) -> torch.Tensor:
    """Weight of each token's policy-gradient term in the step [T]: its slope in the reducer, over the step's
    rollouts (or trained tokens, with ``--calculate-per-token-loss``)."""
    shapes = _Sequences.of(stream)
    if not shapes.lengths:
        return torch.zeros(0, dtype=torch.float64)
    reduce = hook(list(shapes.total_lengths), list(shapes.lengths), shapes.masks(), per_token)
    if not callable(reduce):
        raise hook.broke(f"returned {type(reduce).__name__}, expected a function of the loss")
    reducer = UserFunction(hook.name, reduce)
    ones = torch.ones(sum(shapes.lengths), requires_grad=True)
    value = reducer(ones)
    if not isinstance(value, torch.Tensor) or value.numel() != 1 or not value.requires_grad:
        found = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
        raise hook.broke(f"its reducer returned {found}, expected one number that depends on the loss")
    (slope,) = torch.autograd.grad(value.reshape(()), ones)
    rows_of_answer(hook, "the weight of the tokens", shapes.split(slope), shapes.places, shapes.lengths)
    probe = _probe(ones.detach())
    _check_linear(hook, tensor_of_answer(hook, "its reducer's value", reducer(probe)), (slope * probe).sum())
    units = sum(shapes.lengths) if per_token else len(stream.rollouts)
    return slope.double() / units


def _probe(ones: torch.Tensor) -> torch.Tensor:
    return ones + torch.linspace(-0.5, 1.0, len(ones))


def _check_linear(hook: UserFunction, found: torch.Tensor, expected: torch.Tensor) -> None:
    if not torch.allclose(found.double().reshape(-1), expected.double().reshape(-1), _LINEAR, _LINEAR):
        raise hook.broke(
            "is not linear in the loss, so its result would depend on how rollouts are packed",
            "multiply or mask the loss and sum it; let nothing else depend on its value",
        )

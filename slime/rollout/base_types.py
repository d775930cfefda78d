"""What a rollout function returns, and the call that accepts the older bare forms too.

Knows nothing of how samples are made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, overload

from slime.errors import HookError
from slime.rollout.hooks import hook_name
from slime.utils.types import Sample

Group = Sequence[Sample | list[Sample]]
"""The rollouts of one prompt; nested where a rollout yields several samples (fan-out)."""


@dataclass
class RolloutFnTrainOutput:
    """Accepted groups of one rollout step, and metrics of it."""

    samples: Sequence[Group]
    metrics: dict[str, Any] | None = None


@dataclass
class RolloutFnEvalOutput:
    """Per data set: ``{"rewards": [...], "truncated": [...], "samples": [...]}``."""

    data: dict[str, dict[str, Any]]
    metrics: dict[str, Any] | None = None


@overload
def call_rollout_fn(
    fn: Callable[..., Any], *args: Any, evaluation: Literal[False], **kwargs: Any
) -> RolloutFnTrainOutput: ...
@overload
def call_rollout_fn(
    fn: Callable[..., Any], *args: Any, evaluation: Literal[True], **kwargs: Any
) -> RolloutFnEvalOutput: ...
def call_rollout_fn(
    fn: Callable[..., Any], *args: Any, evaluation: bool, **kwargs: Any
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """Call a rollout function; a bare list (training) or dict (evaluation) is wrapped.

    Raises:
        HookError: it returned something else.
    """
    output = fn(*args, **kwargs, evaluation=evaluation)
    if evaluation:
        if isinstance(output, RolloutFnEvalOutput):
            return output
        if isinstance(output, dict):
            return RolloutFnEvalOutput(data=output)
    elif isinstance(output, RolloutFnTrainOutput):
        return output
    elif isinstance(output, list):
        return RolloutFnTrainOutput(samples=output)
    expected = "RolloutFnEvalOutput or dict" if evaluation else "RolloutFnTrainOutput or list of groups"
    raise HookError(f"returned {type(output).__name__}, expected {expected}", place=hook_name(fn))

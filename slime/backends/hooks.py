"""The user's functions that training calls, loaded, and how what they return is checked.

Invariant: what a hook got wrong is an error that names the flag, the function, and the rollout or sample with
its lengths. Knows rows and rollouts; knows no estimator, no loss and no model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slime.utils.user_function import UserFunction

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainHooks:
    """The hooks of a run that the trainer's side calls; None is off.

    Attributes:
        args: what hooks get as their first argument.
        rollout_id: the rollout step.
        advantages: ``--custom-advantage-function-path``.
        tis: ``--custom-tis-function-path``.
        reducer: ``--custom-pg-loss-reducer-function-path``.
        loss: ``--custom-loss-function-path``.
        postprocess: ``--rollout-data-postprocess-path``.
    """

    args: Any = None
    rollout_id: int = 0
    advantages: UserFunction | None = None
    tis: UserFunction | None = None
    reducer: UserFunction | None = None
    loss: UserFunction | None = None
    postprocess: UserFunction | None = None


NO_HOOKS = TrainHooks()
DESTS = {
    "advantages": "custom_advantage_function_path",
    "tis": "custom_tis_function_path",
    "reducer": "custom_pg_loss_reducer_function_path",
    "loss": "custom_loss_function_path",
    "postprocess": "rollout_data_postprocess_path",
}
"""Field of `TrainHooks` -> name on `args`."""


def load_hooks(args: Any, load: Callable[[str, str], Callable[..., Any]]) -> TrainHooks:
    """The hooks that `args` name.

    Args:
        load: gives the function for a path and the name on `args` that holds it.

    Raises:
        HookError: see `load`.
    """
    paths = {field: getattr(args, dest) for field, dest in DESTS.items()}
    functions: dict[str, Any] = {
        field: UserFunction(f"--{DESTS[field].replace('_', '-')} ({path})", load(path, DESTS[field]))
        for field, path in paths.items()
        if path
    }
    return TrainHooks(args=args, **functions)


def rows_of_answer(
    hook: UserFunction, name: str, answer: Any, places: Sequence[str], lengths: Sequence[int]
) -> list[torch.Tensor]:
    """A list of one sequence of numbers a place, float64 on the CPU, detached.

    Args:
        name: what they are, for errors.
        places: rollout or sample of each, for errors.
        lengths: how many numbers each must have.

    Raises:
        HookError: not a list, of another length, or a part of another shape or not finite.
    """
    import torch

    if not isinstance(answer, list | tuple) or len(answer) != len(places):
        found = f"{len(answer)} of them" if isinstance(answer, list | tuple) else type(answer).__name__
        raise hook.broke(
            f"{name} must be a list of {len(places)}, one for each of {_few(places)}; got {found}"
        )
    rows = []
    for value, place, length in zip(answer, places, lengths, strict=True):
        row = tensor_of_answer(hook, f"{name} of {place}", value)
        if tuple(row.shape) != (length,):
            raise hook.broke(f"{name} of {place} has shape {tuple(row.shape)}, expected ({length},)")
        if not bool(torch.isfinite(row).all()):
            raise hook.broke(f"{name} of {place} ({length} tokens) are not all finite")
        rows.append(row)
    return rows


def tensor_of_answer(hook: UserFunction, name: str, value: Any) -> torch.Tensor:
    """`value` as a float64 tensor on the CPU, detached.

    Raises:
        HookError: it is no tensor, number or sequence of numbers.
    """
    import torch

    try:
        return torch.as_tensor(value).detach().to("cpu", torch.float64)
    except (TypeError, ValueError, RuntimeError) as error:
        raise hook.broke(f"{name} is {value!r:.100}, expected a tensor of numbers") from error


def _few(places: Sequence[str]) -> str:
    return ", ".join(places[:3]) + (f" ... {places[-1]}" if len(places) > 3 else "")

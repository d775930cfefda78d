"""Loading, checking and calling of user hooks, with errors that name the flag, the path and both signatures.

A hook is named by a dotted path. Its signature is checked before anything runs, by binding the call that
slime will make; what it returns is checked at the call. Knows the contracts, not what hooks do.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from slime.errors import HookError, SlimeError
from slime.utils.misc import load_function
from slime.utils.types import Sample

Hook = Callable[..., Any]


@dataclass(frozen=True)
class Contract:
    """How slime calls a hook: arguments by position, then by keyword.

    Attributes:
        optional: keyword arguments that are passed only to a signature that takes them.
        is_class: the path names a class; the call is its constructor and `methods` must exist.
    """

    positional: tuple[str, ...]
    keyword: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    is_class: bool = False
    methods: tuple[str, ...] = ()


CONTRACTS: dict[str, Contract] = {
    "rollout_function_path": Contract(("args", "rollout_id", "data_source"), ("evaluation",)),
    "eval_function_path": Contract(("args", "rollout_id", "data_source"), ("evaluation",)),
    "custom_generate_function_path": Contract(
        ("args", "sample", "sampling_params"), optional=("evaluation",)
    ),
    "rollout_sample_hook_path": Contract(("args", "sample"), optional=("rollout_id", "evaluation")),
    "custom_rm_path": Contract(("args", "sample")),
    "dynamic_sampling_filter_path": Contract(("args", "group")),
    "buffer_filter_path": Contract(("args", "rollout_id", "buffer", "num_samples")),
    "data_source_path": Contract(
        ("args",), is_class=True, methods=("get_samples", "add_samples", "save", "load", "__len__")
    ),
    "rollout_sample_filter_path": Contract(("args", "groups")),
    "rollout_all_samples_process_path": Contract(("args", "all_groups", "data_source")),
    "custom_rollout_log_function_path": Contract(
        ("rollout_id", "args", "samples", "extra_metrics", "seconds")
    ),
    "custom_eval_rollout_log_function_path": Contract(("rollout_id", "args", "data", "extra_metrics")),
    "custom_reward_post_process_path": Contract(("args", "samples")),
    "custom_convert_samples_to_train_data_path": Contract(("args", "samples")),
    "custom_advantage_function_path": Contract(("args", "rollout_data")),
    "rollout_data_postprocess_path": Contract(("args", "rollout_id", "rollout_data")),
    "custom_loss_function_path": Contract(("args", "batch", "logits", "sum_of_sample_mean")),
    "custom_tis_function_path": Contract(
        ("args",),
        (
            "pg_loss",
            "train_log_probs",
            "rollout_log_probs",
            "loss_masks",
            "total_lengths",
            "response_lengths",
        ),
    ),
    "custom_update_weight_post_write_path": Contract(("args", "version_dir", "rollout_engines")),
    "custom_pg_loss_reducer_function_path": Contract(
        ("total_lengths", "response_lengths", "masks", "per_token")
    ),
}
"""Name on `args` of each hook -> its contract."""


def check_hooks(args: Any) -> None:
    """Load every hook that is set on `args` and check its signature.

    Raises:
        HookError: naming flag, path, expected and found signature.
    """
    for dest in CONTRACTS:
        value = getattr(args, dest, None)
        for path in value if isinstance(value, list) else [value]:
            if path:
                load_hook(path, dest)


@functools.cache
def load_hook(path: str, dest: str) -> Hook:
    """The hook at `path`, checked against the contract of the flag `dest`, once per process.

    Raises:
        HookError: it does not import, is not callable, or cannot take the call.
    """
    flag = flag_name(dest)
    try:
        hook = load_function(path)
    except HookError as error:
        raise HookError(error.message, place=flag, remedy=error.remedy) from error
    contract = CONTRACTS[dest]
    check_signature(
        hook, path, contract.positional, flag, keyword_args=contract.keyword, optional_args=contract.optional
    )
    missing = [name for name in contract.methods if not hasattr(hook, name)]
    if contract.is_class and (missing or not inspect.isclass(hook)):
        what = f"has no {', '.join(missing)}" if inspect.isclass(hook) else "is not a class"
        raise HookError(
            f"{path} {what}", place=flag, remedy=f"it needs the methods {', '.join(contract.methods)}"
        )
    return cast("Hook", hook)


def flag_name(dest: str) -> str:
    """``custom_rm_path`` -> ``--custom-rm-path``."""
    return "--" + dest.replace("_", "-")


def hook_name(hook: Any) -> str:
    """Dotted name of a function or class, for messages."""
    qualified = getattr(hook, "__qualname__", None)
    return f"{hook.__module__}.{qualified}" if qualified else repr(hook)


def check_signature(
    function: Any,
    path: str,
    needed_args: Sequence[str],
    flag: str,
    *,
    keyword_args: Sequence[str] = (),
    optional_args: Sequence[str] = (),
) -> None:
    """Check that `function` takes `needed_args` by position and `keyword_args` by name.

    Args:
        optional_args: keyword arguments that it may require, and may lack.

    Raises:
        HookError: it is not callable, or the call does not bind.
    """
    if not callable(function):
        raise HookError(f"{path} is of type {type(function).__name__}, not callable", place=flag)
    try:
        signature = inspect.signature(function)
    except ValueError:
        return  # a builtin without a readable signature; the call itself will tell
    expected = ", ".join([*needed_args, *(f"{name}=..." for name in keyword_args)])
    if optional_args:
        expected += f"[, {', '.join(f'{name}=...' for name in optional_args)}]"
    keywords = [*keyword_args, *(name for name in optional_args if names_argument(function, name))]
    try:
        signature.bind(*needed_args, **dict.fromkeys(keywords))
    except TypeError as error:
        raise HookError(
            f"{path} has the wrong signature: expected ({expected}), found {signature} ({error})",
            place=flag,
            remedy=f"define it so that it can be called as {path.rpartition('.')[2]}({expected})",
        ) from error


def accepted_kwargs(function: Hook, offered: dict[str, Any]) -> dict[str, Any]:
    """The offered keyword arguments that the signature names, or all where it has ``**kwargs``."""
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return offered
    by_name = {p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)}
    return {name: value for name, value in offered.items() if name in by_name}


def names_argument(function: Hook, name: str) -> bool:
    """True when the signature itself names the argument (``**kwargs`` does not count)."""
    parameter = inspect.signature(function).parameters.get(name)
    return parameter is not None and parameter.kind in (
        parameter.KEYWORD_ONLY,
        parameter.POSITIONAL_OR_KEYWORD,
    )


async def run_hook(
    hook: Hook, flag: str, args: tuple[Any, ...], kwargs: dict[str, Any], *, allow_sync: bool = False
) -> Any:
    """Call a hook and return its value, awaited.

    Raises:
        HookError: the hook raised, or is not async though it must be; errors of slime's own pass unchanged.
    """
    try:
        value = hook(*args, **kwargs)
        if inspect.isawaitable(value):
            return await value
    except SlimeError:
        raise
    except Exception as error:
        raise HookError(f"{hook_name(hook)} raised {type(error).__name__}: {error}", place=flag) from error
    if allow_sync:
        return value
    raise HookError(
        f"{hook_name(hook)} is not async: it returned {type(value).__name__}",
        place=flag,
        remedy="define it with `async def`",
    )


async def call_generate(
    function: Hook, args: Any, sample: Sample, sampling_params: dict[str, Any], evaluation: bool
) -> Sample | list[Sample]:
    """Run a generate hook; `evaluation` is passed only if the signature names it.

    Returns:
        One sample, or the siblings of one rollout.

    Raises:
        HookError: it is not async, raised, or returned something else.
    """
    flag = flag_name("custom_generate_function_path")
    extra = {"evaluation": evaluation} if names_argument(function, "evaluation") else {}
    result = await run_hook(function, flag, (args, sample, sampling_params), extra)
    if isinstance(result, Sample):
        return result
    if isinstance(result, list) and result and all(isinstance(item, Sample) for item in result):
        return result
    found = (
        f"a list of {[type(item).__name__ for item in result]}" if isinstance(result, list) else repr(result)
    )
    raise HookError(
        f"{hook_name(function)} returned {found}, expected a Sample or a non-empty list of Samples",
        place=flag,
    )

"""Evaluation data sets: from ``--eval-config`` (YAML) or ``--eval-prompt-data`` to `EvalDatasetConfig`s.

A value comes from the entry, else from the file's defaults, else from ``--eval-...``, else from the rollout's
flag. A key that nothing reads is an error, never ignored.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from slime.errors import ConfigError

FLAG = "--eval-config"


_UNUSED = "nothing has ever read it"


class EvalConfigValueError(ConfigError, ValueError):
    """A key in ``eval.defaults`` that does not exist."""


class EvalConfigTypeError(ConfigError, TypeError):
    """A key in an entry of ``eval.datasets`` that does not exist."""


@dataclass
class EvalDatasetConfig:
    """One evaluation data set, every value resolved.

    Attributes:
        rm_type, custom_rm_path, custom_generate_function_path: overrides for this set's samples.
        max_prompt_len: longer prompts are left out; max_context_len bounds prompt and response together.
        pass_threshold: reward from which a rollout passes (default: rewards are 0 or 1).
    """

    name: str
    path: str
    rm_type: str | None = None
    custom_rm_path: str | None = None
    custom_generate_function_path: str | None = None
    input_key: str = "input"
    label_key: str | None = None
    tool_key: str | None = None
    metadata_key: str = "metadata"
    apply_chat_template: bool = False
    apply_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    n_samples_per_eval_prompt: int = 1
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_new_tokens: int | None = None
    max_response_len: int | None = None
    max_prompt_len: int | None = None
    max_context_len: int | None = None
    stop: list[str] | None = None
    stop_token_ids: list[int] | None = None
    repetition_penalty: float | None = None
    skip_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    pass_threshold: float | None = None


_BELONGS_ELSEWHERE = {
    "multimodal_keys": "image, video and audio prompts are not supported",
    "app_service": _UNUSED,
    "eval_task_timeout": "the deadline of a rollout is --rollout-timeout",
    "min_eval_samples": _UNUSED,
    "eval_early_stop_remaining": "every rollout is waited for, at most --rollout-timeout",
    "eval_early_stop_idle_timeout": "every rollout is waited for, at most --rollout-timeout",
    "message_processor": "use custom_generate_function_path",
    "reward_model": "use rm_type or custom_rm_path",
    "remote_environment": "use custom_generate_function_path",
    "metadata_overrides": "write it into the metadata of the rows",
}
"""Keys that the reference accepts and nothing reads -> what to do instead."""
_AT_LEAST: dict[str, float] = {
    "temperature": 0,
    "top_k": -1,
    "min_new_tokens": 0,
    "n_samples_per_eval_prompt": 1,
    "max_response_len": 1,
    "max_prompt_len": 1,
    "max_context_len": 2,
}
_KEYS = {item.name for item in dataclasses.fields(EvalDatasetConfig)}
_FROM_ARGS: dict[str, tuple[str, ...]] = {
    "input_key": ("eval_input_key", "input_key"),
    "label_key": ("eval_label_key", "label_key"),
    "tool_key": ("eval_tool_key", "tool_key"),
    "metadata_key": ("metadata_key",),
    "apply_chat_template": ("apply_chat_template",),
    "apply_chat_template_kwargs": ("apply_chat_template_kwargs",),
    "n_samples_per_eval_prompt": ("n_samples_per_eval_prompt",),
    "temperature": ("eval_temperature", "rollout_temperature"),
    "top_p": ("eval_top_p", "rollout_top_p"),
    "top_k": ("eval_top_k", "rollout_top_k"),
    "min_new_tokens": ("eval_min_new_tokens",),
    "max_response_len": ("eval_max_response_len", "rollout_max_response_len"),
    "max_prompt_len": ("eval_max_prompt_len", "rollout_max_prompt_len"),
    "max_context_len": ("eval_max_context_len", "rollout_max_context_len"),
    "stop": ("rollout_stop",),
    "stop_token_ids": ("rollout_stop_token_ids",),
    "skip_special_tokens": ("rollout_skip_special_tokens",),
    "pass_threshold": ("pass_threshold",),
}
"""Key -> attributes of `args`, the first that is set wins."""


def build_eval_dataset_configs(args: Any) -> list[EvalDatasetConfig]:
    """The evaluation data sets of a run; empty when none is configured.

    Args:
        args: reads eval_config, eval_prompt_data and the flags that give defaults; absent means unset.

    Raises:
        ConfigError: the file cannot be used, or both flags are set, or names repeat. It is a ValueError too
            for an unknown key in the defaults, and a TypeError too for one in an entry.
    """
    file, pairs = getattr(args, "eval_config", None), getattr(args, "eval_prompt_data", None)
    if file and pairs:
        raise ConfigError("both are set", place=f"{FLAG}, --eval-prompt-data", remedy="keep one of them")
    defaults, entries = _read(file) if file else ({}, _pairs(pairs or []))
    configs = [_resolved(entry, defaults, args, file or "--eval-prompt-data") for entry in entries]
    names = [config.name for config in configs]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise ConfigError(f"data set names repeat: {', '.join(repeated)}", place=file or "--eval-prompt-data")
    return configs


def _pairs(values: list[str]) -> list[dict[str, Any]]:
    if len(values) % 2:
        raise ConfigError(
            f"expects pairs, got {len(values)} values",
            place="--eval-prompt-data",
            remedy="--eval-prompt-data name path name path ...",
        )
    return [{"name": name, "path": path} for name, path in zip(values[::2], values[1::2], strict=True)]


def _read(file: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Defaults and entries of the YAML file."""
    import yaml

    try:
        content = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", place=file, remedy=f"check {FLAG}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"is not YAML: {error}", place=file) from error
    root = _mapping(content, "the file", file)
    section = _mapping(root.get("eval", root), "eval", file)
    strange = sorted(map(str, section.keys() - {"defaults", "datasets"}))
    if strange:
        raise EvalConfigValueError(
            f"unknown key {', '.join(strange)}", place=file, remedy="eval has the keys defaults and datasets"
        )
    defaults = dict(_mapping(section.get("defaults") or {}, "eval.defaults", file))
    unknown = sorted(map(str, defaults.keys() - (_KEYS - {"name", "path"})))
    if unknown:
        raise EvalConfigValueError(
            f"unknown key in eval.defaults: {', '.join(unknown)}", place=file, remedy=_advice(unknown)
        )
    _check_values(defaults, f"{file}: eval.defaults")
    return defaults, _entries(section.get("datasets"), file)


def _entries(datasets: Any, file: str) -> list[dict[str, Any]]:
    """A list of entries, or a mapping from name to entry."""
    if isinstance(datasets, Mapping):
        return [
            {"name": name, **_mapping(entry, f"eval.datasets.{name}", file)}
            for name, entry in datasets.items()
        ]
    if not isinstance(datasets, list) or not datasets:
        raise ConfigError("eval.datasets must be a non-empty list or mapping", place=file)
    return [dict(_mapping(entry, "an entry of eval.datasets", file)) for entry in datasets]


def _mapping(value: Any, what: str, file: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{what} must be a mapping, got {type(value).__name__}", place=file)
    return value


def _resolved(entry: dict[str, Any], defaults: dict[str, Any], args: Any, place: str) -> EvalDatasetConfig:
    name = entry.get("name", "?")
    unknown = sorted(map(str, entry.keys() - _KEYS))
    if unknown:
        raise EvalConfigTypeError(
            f"unknown key in data set {name!r}: {', '.join(unknown)}", place=place, remedy=_advice(unknown)
        )
    _check_values(entry, f"{place}: data set {name!r}")
    missing = [key for key in ("name", "path") if not entry.get(key)]
    if missing:
        raise ConfigError(f"data set {name!r} has no {' and no '.join(missing)}", place=place)
    from_args = {key: _first(args, attributes) for key, attributes in _FROM_ARGS.items()}
    layers = (from_args, defaults, entry)
    values = {key: value for layer in layers for key, value in layer.items() if value is not None}
    for key in ("stop", "stop_token_ids"):
        if key in values and not isinstance(values[key], list):
            values[key] = [values[key]]
    return EvalDatasetConfig(**values)


def _advice(unknown: list[str]) -> str:
    """What to do about unknown keys: what takes their place, or the nearest known one."""
    parts = []
    for key in unknown:
        close = difflib.get_close_matches(key, _KEYS, n=1)
        said = _BELONGS_ELSEWHERE.get(key) or (f"did you mean {close[0]!r}?" if close else "leave it out")
        parts.append(f"{key}: {said}")
    return "; ".join(parts)


def _check_values(values: Mapping[str, Any], place: str) -> None:
    """Check types and ranges of what the file says; None means unset.

    Raises:
        ConfigError: naming the key and the value.
    """
    hints = get_type_hints(EvalDatasetConfig)
    for key, value in values.items():
        if value is None:
            continue
        kinds = get_args(hints[key]) if isinstance(hints[key], UnionType) else (hints[key],)
        wanted = next(kind for kind in kinds if kind is not type(None))
        if not _fits(value, wanted):
            shown = getattr(wanted, "__name__", str(wanted)) if get_origin(wanted) is None else str(wanted)
            raise ConfigError(f"{key} must be of type {shown}, got {value!r}", place=place)
        low = _AT_LEAST.get(key)
        if low is not None and not value >= low:
            raise ConfigError(f"{key} must be at least {low}, got {value!r}", place=place)
        if (key == "top_p" and not 0 < value <= 1) or (key == "top_k" and value == 0):
            allowed = "above 0 and at most 1" if key == "top_p" else "-1 (all) or at least 1"
            raise ConfigError(f"{key} must be {allowed}, got {value!r}", place=place)


def _fits(value: Any, wanted: Any) -> bool:
    origin, inner = get_origin(wanted), get_args(wanted)
    if origin is list:
        return all(_fits(item, inner[0]) for item in (value if isinstance(value, list) else [value]))
    if origin is dict:
        return isinstance(value, dict) and all(isinstance(key, str) for key in value)
    if wanted is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return isinstance(value, wanted) and (wanted is bool or not isinstance(value, bool))


def _first(args: Any, attributes: tuple[str, ...]) -> Any:
    values = (getattr(args, attribute, None) for attribute in attributes)
    return next((value for value in values if value is not None), None)

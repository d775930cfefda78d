"""From the JSON `sampling_params` of a request to `SamplingParams`.

Invariant: a value that passed is in range for this model; everything else is an `EngineRequestError` that
names the parameter and its range. Knows nothing of prompts, batches or HTTP.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from slime.errors import EngineRequestError
from slime.serving.embedded.request import SamplingParams

Check: TypeAlias = Callable[[str, Any, int], Any]
"""(parameter name, JSON value, vocabulary size) -> typed value."""


def parse_sampling_params(given: Any, *, vocab_size: int, room: int) -> tuple[SamplingParams, int]:
    """Check one `sampling_params` object; null stands for the default.

    Args:
        room: tokens that the context leaves behind the prompt; `max_new_tokens: null` takes them all.

    Returns:
        The parameters, and how many answers are wanted (`n`).

    Raises:
        EngineRequestError: unknown, unsupported or out of range; the message names it.
    """
    if not isinstance(given, Mapping):
        raise EngineRequestError(f"sampling_params must be an object, got {given!r}.")
    values = {}
    for name, value in given.items():
        check = _known(name)
        if value is not None:
            values[name] = check(name, value, vocab_size)
    if "max_new_tokens" in given and given["max_new_tokens"] is None:
        values["max_new_tokens"] = room
    count = values.pop("n", 1)
    params = SamplingParams(**values)
    if params.min_new_tokens > params.max_new_tokens:
        raise EngineRequestError(
            f"min_new_tokens must be in [0, max_new_tokens({params.max_new_tokens})], "
            f"got {params.min_new_tokens}."
        )
    return params, count


def _known(name: str) -> Check:
    if name not in _CHECKS:
        known = ", ".join(f"`{known}`" for known in _CHECKS)
        raise EngineRequestError(f"unknown field `{name}`, expected one of {known}")
    return _CHECKS[name]


def number(words: str, fits: Callable[[float], bool]) -> Check:
    """A check for real numbers; `words` completes "must be ..."."""

    def check(name: str, value: Any, _: int) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not fits(value):
            raise EngineRequestError(f"{name} must be {words}, got {value!r}.")
        return float(value)

    return check


def integer(words: str, fits: Callable[[int], bool]) -> Check:
    """A check for whole numbers; `words` completes "must be ..."."""

    def check(name: str, value: Any, _: int) -> int:
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not fits(value):
            raise EngineRequestError(f"{name} must be {words}, got {value!r}.")
        return value

    return check


def boolean(name: str, value: Any, _: int = 0) -> bool:
    """A check for true and false."""
    if not isinstance(value, bool):
        raise EngineRequestError(f"{name} must be true or false, got {value!r}.")
    return value


def _stop_strings(name: str, value: Any, _: int) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise EngineRequestError(f"{name} must be a non-empty string or a list of them, got {value!r}.")
    return tuple(texts)


def _token_ids(name: str, value: Any, vocab_size: int) -> frozenset[int]:
    if not isinstance(value, list):
        raise EngineRequestError(f"{name} must be a list of token ids, got {value!r}.")
    check_token_ids(name, value, vocab_size)
    return frozenset(value)


def _logit_bias(name: str, value: Any, vocab_size: int) -> dict[int, float]:
    if not isinstance(value, dict):
        raise EngineRequestError(f"{name} must map token ids to numbers, got {value!r}.")
    try:
        biases = {int(token): float(bias) for token, bias in value.items()}
    except (TypeError, ValueError) as error:
        raise EngineRequestError(f"{name} must map token ids to numbers, got {value!r}.") from error
    check_token_ids(name, list(biases), vocab_size)
    return biases


def check_token_ids(name: str, ids: list[Any], vocab_size: int) -> None:
    """Raise unless all `ids` are whole numbers in [0, vocab_size)."""
    if ids and set(map(type, ids)) != {int}:
        wrong = next(item for item in ids if type(item) is not int)
        raise EngineRequestError(f"{name} must hold whole numbers, got {wrong!r}.")
    if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
        wrong = next(item for item in ids if not 0 <= item < vocab_size)
        raise EngineRequestError(f"{name} must be in [0, {vocab_size}), the vocabulary; got {wrong}.")


def _unsupported(name: str, value: Any, _: int) -> None:
    raise EngineRequestError(f"{name} is not supported by the embedded engine; got {value!r}.")


_NEUTRAL = number("in [-2, 2]", lambda x: -2 <= x <= 2)
_COUNT = integer("a whole number, at least 0", lambda x: x >= 0)
_CHECKS: dict[str, Check] = {
    "max_new_tokens": _COUNT,
    "min_new_tokens": _COUNT,
    "stop": _stop_strings,
    "stop_token_ids": _token_ids,
    "temperature": number("at least 0 and finite", lambda x: 0 <= x < float("inf")),
    "top_p": number("in (0, 1]", lambda x: 0 < x <= 1),
    "top_k": integer("-1 (all) or at least 1", lambda x: x == -1 or x >= 1),
    "min_p": number("in [0, 1]", lambda x: 0 <= x <= 1),
    "frequency_penalty": _NEUTRAL,
    "presence_penalty": _NEUTRAL,
    "repetition_penalty": number("in (0, 2]", lambda x: 0 < x <= 2),
    "n": integer("a whole number in [1, 4096]", lambda x: 1 <= x <= 4096),
    "ignore_eos": boolean,
    "skip_special_tokens": boolean,
    "spaces_between_special_tokens": boolean,
    "no_stop_trim": boolean,
    "sampling_seed": integer("a whole number in [0, 2^63)", lambda x: 0 <= x < 2**63),
    "logit_bias": _logit_bias,
    "stop_regex": _unsupported,
    "json_schema": _unsupported,
    "regex": _unsupported,
    "ebnf": _unsupported,
    "structural_tag": _unsupported,
    "custom_params": _unsupported,
}

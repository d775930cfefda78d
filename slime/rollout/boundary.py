"""The boundary between user code and slime: what a generate hook gave is checked here, once.

Invariant: a sample that passed can be trained on: there is a prompt, ids are of the vocabulary, lengths
agree, the mask is 0 or 1, every trained token has a finite log-prob, siblings have one id. Messages name
hook, sample, field and both lengths.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slime.errors import HookError
from slime.utils.types import Sample


def checked_siblings(result: Any, base: Sample, hook: str) -> list[Sample]:
    """The samples of a hook's answer, with the ids of `base` filled in.

    Raises:
        HookError: not a Sample or a non-empty list of them, or siblings with different rollout ids.
    """
    samples = result if isinstance(result, list) else [result]
    if not samples or not all(isinstance(sample, Sample) for sample in samples):
        raise HookError(
            f"returned {_type_of(result)}, expected a Sample or a non-empty list of Samples", place=hook
        )
    ids = sorted({sample.rollout_id for sample in samples if sample.rollout_id is not None})
    if len(ids) > 1:
        raise HookError(
            f"returned siblings with different rollout_id {ids} for sample {base.index}",
            place=hook,
            remedy="leave rollout_id unset: one call of the hook is one rollout",
        )
    for sample in samples:
        sample.rollout_id = base.rollout_id
        sample.group_index = base.group_index
        sample.index = base.index if sample.index is None else sample.index
    return samples


def check_trainable(
    sample: Sample, hook: str, *, vocab_size: int | None = None, needs_log_probs: bool = True
) -> None:
    """Check the per-token fields of one sample.

    Args:
        vocab_size: rows of the model's embedding, where known.
        needs_log_probs: trained tokens without log-probs are an error; else only wrong ones are.

    Raises:
        HookError: naming hook, sample, field and both lengths.
    """
    length = sample.response_length
    if not sample.tokens:
        raise _bad(
            sample, hook, "tokens", "is empty: the hook must set the token ids that the engine returned"
        )
    if not 0 <= length <= len(sample.tokens):
        raise _bad(sample, hook, "response_length", f"is {length}, tokens has length {len(sample.tokens)}")
    if length == len(sample.tokens):
        raise _bad(
            sample,
            hook,
            "response_length",
            f"is {length}, all of tokens: no token of the prompt is before it",
        )
    _check_ids(sample, hook, vocab_size)
    mask = [1] * length if sample.loss_mask is None else sample.loss_mask
    for field in ("loss_mask", "rollout_log_probs", "teacher_log_probs"):
        value = getattr(sample, field)
        if value is not None and len(value) != length:
            raise _bad(sample, hook, field, f"has length {len(value)}, response_length is {length}")
    strange = next((value for value in mask if value not in (0, 1)), None)
    if strange is not None:
        raise _bad(sample, hook, "loss_mask", f"holds {strange!r}; every entry must be 0 or 1")
    if needs_log_probs or sample.rollout_log_probs is not None:
        _check_log_probs(sample, hook, mask)


@functools.cache
def vocabulary_size(model: str | None) -> int | None:
    """`vocab_size` of the ``config.json`` in a model folder; None where it cannot be read there."""
    path = Path(model or "") / "config.json"
    if not model or not path.is_file():
        return None
    config = json.loads(path.read_text(encoding="utf-8"))
    size = config.get("vocab_size", config.get("text_config", {}).get("vocab_size"))
    return size if isinstance(size, int) else None


def _check_ids(sample: Sample, hook: str, vocab_size: int | None) -> None:
    low, high = min(sample.tokens), max(sample.tokens)
    if low < 0:
        raise _bad(sample, hook, "tokens", f"holds {low}; ids start at 0")
    if vocab_size is not None and high >= vocab_size:
        raise _bad(sample, hook, "tokens", f"holds {high}, the vocabulary of the model has {vocab_size} ids")


def _check_log_probs(sample: Sample, hook: str, mask: Sequence[int]) -> None:
    log_probs = sample.rollout_log_probs
    if not any(mask):
        return
    if log_probs is None:
        trained = sum(mask)
        problem = f"is missing for {trained} trained tokens (response_length {sample.response_length})"
        raise _bad(sample, hook, "rollout_log_probs", problem)
    for position, (trains, value) in enumerate(zip(mask, log_probs, strict=True)):
        if trains and (value is None or not math.isfinite(value)):
            raise _bad(sample, hook, "rollout_log_probs", f"is {value} at response token {position}")


def _bad(sample: Sample, hook: str, field: str, problem: str) -> HookError:
    return HookError(f"sample {sample.index}: {field} {problem}", place=hook)


def _type_of(result: Any) -> str:
    if not isinstance(result, list):
        return type(result).__name__
    return f"a list of {sorted({type(item).__name__ for item in result}) or 'nothing'}"

"""Rewards for following verifiable instructions (IFEval, IFBench): 1.0 if all of a prompt's are followed.

The instruction ids and their kwargs stand in the label or in metadata. Invariant: an id that has no checker
here is an error that names it, never a wrong answer. Nothing is downloaded; runs in a worker process.
"""

from __future__ import annotations

import difflib
import inspect
import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from slime.errors import RewardError
from slime.rollout.rm_hub.ifbench import constraints, formats, ifeval
from slime.rollout.rm_hub.verdict import Invalid

METADATA_KEYS = ("instruction_id_list", "kwargs", "ifbench_mode")
CHECKERS: dict[str, ifeval.Checker] = {
    **ifeval.CHECKERS,
    **constraints.CHECKERS,
    **formats.CHECKERS,
}
"""Instruction id -> ``(response, **kwargs) -> followed``."""


def compute_ifbench_reward(
    response: str, label: Any = None, metadata: Mapping[str, Any] | None = None
) -> float:
    """The number alone of `ifbench_check`."""
    verdict = ifbench_check(response, label, metadata)
    return float(verdict.reward) if isinstance(verdict, Invalid) else verdict


def ifbench_check(response: str, label: Any, metadata: Mapping[str, Any] | None = None) -> float | Invalid:
    """1.0 if the response follows all its instructions, else 0.0.

    Args:
        label: a mapping (or its JSON) with `instruction_id_list` and `kwargs`, one mapping an id; or None.
        metadata: has the same, and wins; `ifbench_mode` is ``strict`` (default) or ``loose``.

    Returns:
        `Invalid` for an empty response.

    Raises:
        RewardError: an id is not known, its kwargs do not fit, or there are no instructions.
    """
    given = {**_mapping(label), **(metadata or {})}
    ids, kwargs = _instructions(given)
    mode = given.get("ifbench_mode") or "strict"
    if mode not in ("strict", "loose"):
        raise RewardError(f"ifbench_mode is {mode!r}, not strict or loose", reason="instruction")
    if not response.strip():
        return Invalid(0.0, "empty_response")
    variants = loose_variants(response) if mode == "loose" else [response]
    return float(all(follows(name, own, variants) for name, own in zip(ids, kwargs, strict=True)))


def follows(instruction: str, kwargs: Mapping[str, Any], variants: Sequence[str]) -> bool:
    """Whether any of the variants of a response follows an instruction.

    Args:
        kwargs: of the data set; those that are None are taken as absent.

    Raises:
        RewardError: the id is not known, or its kwargs do not fit.
    """
    checker = CHECKERS.get(instruction)
    if checker is None:
        near = difflib.get_close_matches(instruction, CHECKERS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise RewardError(
            f"has no checker of the instruction {instruction!r}{hint}", reason="unknown_instruction"
        )
    own = {name: _whole(value) for name, value in kwargs.items() if value is not None}
    try:
        inspect.signature(checker).bind("", **own)
    except TypeError as error:
        raise RewardError(f"instruction {instruction}: {error}", reason="instruction") from error
    try:
        return any(checker(variant, **own) for variant in variants if variant.strip())
    except ValueError as error:
        raise RewardError(f"instruction {instruction}: {error}", reason="instruction") from error


def _whole(value: Any) -> Any:
    """Counts as integers; tables with missing values hold them as floats."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def loose_variants(response: str) -> list[str]:
    """The response with and without its first and last line, and its asterisks (IFEval, section 2.2)."""
    lines = response.split("\n")
    spans = itertools.product((0, 1), (0, 1))
    cut = ["\n".join(lines[first : len(lines) - last]).strip() for first, last in spans]
    return [variant for text in cut for variant in (text, text.replace("*", ""))]


def _instructions(given: Mapping[str, Any]) -> tuple[list[str], list[Mapping[str, Any]]]:
    ids = _list(given.get("instruction_id_list"))
    kwargs = [own or {} for own in _list(given.get("kwargs"))] or [{}] * len(ids)
    if not ids or len(kwargs) != len(ids):
        raise RewardError(
            f"label and metadata give {len(ids)} instructions and {len(kwargs)} kwargs",
            remedy="give instruction_id_list, and kwargs with one mapping an id",
            reason="instruction",
        )
    return [str(name) for name in ids], kwargs


def _list(value: Any) -> list[Any]:
    if isinstance(value, str):
        value = json.loads(value) if value.strip().startswith("[") else [value]
    return list(value or [])


def _mapping(label: Any) -> Mapping[str, Any]:
    if isinstance(label, str) and label.strip().startswith("{"):
        label = json.loads(label)
    return label if isinstance(label, Mapping) else {}

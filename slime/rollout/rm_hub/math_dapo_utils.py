r"""The reward of DAPO (arXiv:2503.14476): the ``Answer:`` line at the end, normalised as for Minerva, as ±1.

Normalisation after Lewkowycz et al., 2022 (arXiv:2206.14858, appendix D.1). Pure functions of two texts; they
run in a worker process.
"""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any

from slime.rollout.rm_hub.boxed import boxed_answer
from slime.rollout.rm_hub.verdict import Invalid

TAIL_CHARACTERS = 300
BOX_TAIL_CHARACTERS = 100
NO_ANSWER = "[INVALID]"
_ANSWER = re.compile(r"answer\s*:[^\S\n]*([^\n]+)", re.IGNORECASE)
_SUBSTITUTIONS = (
    *(("an ", ""), ("a ", ""), (".$", "$"), ("\\$", ""), ("\\ ", ""), (" ", ""), ("mbox", "text")),
    *((",\\text{and}", ","), ("\\text{and}", ","), ("\\text{m}", "\\text{}")),
)
_REMOVED = (
    *("square", "ways", "integers", "dollars", "mph", "inches", "ft", "hours", "km", "units", "\\ldots"),
    *("sue", "points", "feet", "minutes", "digits", "cents", "degrees", "cm", "gm", "pounds", "meters"),
    *("meals", "edges", "students", "childrentickets", "multiples", "\\text{s}", "\\text{.}"),
    *("\\text{\ns}", "\\text{}^2", "\\text{}^3", "\\text{\n}", "\\text{}", "\\mathrm{th}", "^\\circ"),
    *("^{\\circ}", "\\;", ",\\!", "{,}", '"', "\\dots"),
)
_WRAPPERS = re.compile(r"\\(?:text|textbf|overline)\{([^{}]*)\}")
_BOX = re.compile(r"\\boxed\{(.*)\}")
_BETWEEN_DOLLARS = re.compile(r"\$([^$]*)\$")
_SHORT_FRACTION = re.compile(r"frac([^{])(.)")
_SHORT_ROOT = re.compile(r"sqrt([^{])")
_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)")
_MOST_DIGITS = 1000


def compute_score(
    solution_str: str, ground_truth: str, strict_box_verify: bool = False
) -> dict[str, float | bool | str]:
    """Judge the end of a response.

    Args:
        strict_box_verify: compare the last box of the last 100 characters, as text, instead.

    Returns:
        ``{"score": 1.0 or -1.0, "acc": bool, "pred": str}``; `pred` is ``[INVALID]`` without an answer.
    """
    if strict_box_verify:
        pred = boxed_answer(solution_str[-BOX_TAIL_CHARACTERS:])
        right = pred is not None and pred == str(ground_truth)
    else:
        pred = _last_answer(solution_str[-TAIL_CHARACTERS:])
        right = pred is not None and pred == _normalised_truth(str(ground_truth))
    return {"score": 1.0 if right else -1.0, "acc": right, "pred": NO_ANSWER if pred is None else pred}


def dapo_check(response: str, label: str) -> dict[str, Any] | Invalid:
    """`compute_score`, or `Invalid` with it for a response without an ``Answer:`` line."""
    return _verdict(compute_score(response, label), "no_answer_line")


def boxed_dapo_check(response: str, label: str) -> dict[str, Any] | Invalid:
    """`compute_score` in its strict mode, or `Invalid` with it for a response that does not end in a box."""
    return _verdict(compute_score(response, label, strict_box_verify=True), "no_box")


def normalize_final_answer(text: str) -> str:
    """The answer after the last ``=``, without articles, units, LaTeX wrappers and thousands commas."""
    text = text.rpartition("=")[2]
    for before, after in _SUBSTITUTIONS:
        text = text.replace(before, after)
    for words in _REMOVED:
        text = text.replace(words, "")
    found = _BETWEEN_DOLLARS.search(text)
    text = _WRAPPERS.sub(r"\1", found[1] if found else text)
    text = _BOX.sub(r"\1", text)
    text = _SHORT_FRACTION.sub(r"frac{\1}{\2}", text)
    text = _SHORT_ROOT.sub(r"sqrt{\1}", text).replace("$", "")
    without = text.replace(",", "")
    return without if without.lstrip("+-").isdigit() else text.strip()


def _last_answer(tail: str) -> str | None:
    found = _ANSWER.findall(tail)
    return normalize_final_answer(found[-1]) if found else None


def _normalised_truth(label: str) -> str:
    """The label as answers are normalised; an integer that is written as ``12.0`` as ``12``."""
    text = normalize_final_answer(label)
    if len(text) > _MOST_DIGITS or not _NUMBER.fullmatch(text):
        return text
    value = Decimal(text)
    return str(int(value)) if value == value.to_integral_value() else text


def _verdict(score: dict[str, Any], reason: str) -> dict[str, Any] | Invalid:
    return Invalid(score, reason) if score["pred"] == NO_ANSWER else score

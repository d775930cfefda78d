r"""The math reward: is the boxed answer equal to the label, by text or by the library math-verify.

Stricter than math-verify in one point: a fraction of integers that is not in lowest terms equals only the
same text (``2/4`` is not ``1/2``). Runs in a worker process, whose pool holds the deadline.
"""

from __future__ import annotations

import functools
import logging
import math
import re
from typing import Any

from slime.rollout.rm_hub.boxed import boxed_answer, last_boxed_only_string, remove_boxed

__all__ = ["boxed_answer", "grade_answer", "last_boxed_only_string", "math_reward", "remove_boxed"]

_INTEGER = r"\{?\s*(-?\d+)\s*\}?"
_FRACTION = re.compile(rf"-?(?:\\[dt]?frac\s*{_INTEGER}\s*{_INTEGER}|(-?\d+)\s*/\s*(-?\d+))")
_LAYOUT = re.compile(r"\s+|\\left|\\right|\\[!,;:]|\$")


def math_reward(response: str, label: str) -> float:
    r"""1.0 if the last ``\boxed`` or ``\fbox`` of the response equals the label, else 0.0.

    Args:
        label: the answer, boxed or not.
    """
    answer = boxed_answer(response)
    if answer is None:
        return 0.0
    return float(grade_answer(answer, boxed_answer(label) or label))


def grade_answer(answer: str, label: str) -> bool:
    """True if both expressions are equal.

    Raises:
        Exception: whatever parsing or sympy raises; it means that there is no verdict.
    """
    if _plain(answer) == _plain(label):
        return _plain(label) != ""
    if _unreduced(answer) or _unreduced(label):
        return False
    return bool(_verify(_parse(label), _parse(answer)))


def _plain(text: str) -> str:
    """The text without white space, delimiters and layout commands."""
    return _LAYOUT.sub("", text.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac"))


def _unreduced(text: str) -> bool:
    match = _FRACTION.fullmatch(text.strip().strip("$").strip())
    if match is None:
        return False
    numerator, denominator = (int(group) for group in match.groups() if group is not None)
    return abs(denominator) == 1 or math.gcd(numerator, denominator) != 1


def _parse(text: str) -> Any:
    # parsing_timeout=None: the library's own deadline is signal.alarm, and the pool has one.
    return _library().parse(f"\\boxed{{{text}}}", parsing_timeout=None, raise_on_error=True)


def _verify(gold: Any, answer: Any) -> bool:
    return bool(_library().verify(gold, answer, timeout_seconds=None, raise_on_error=True))


@functools.cache
def _library() -> Any:
    import math_verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its deadline is off
    return math_verify

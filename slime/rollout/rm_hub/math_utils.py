r"""The math reward: is the boxed answer equal to the label, by text, by exact numbers or by math-verify.

As in the graders of MATH and PRM800K, a label that is an integer takes an integer only, and a fraction of
integers that is not in lowest terms equals only the same text (``2/4`` is not ``1/2``). Runs in a worker
process, whose pool holds the deadline.
"""

from __future__ import annotations

import re

from slime.rollout.rm_hub import expressions
from slime.rollout.rm_hub.boxed import boxed_answer, last_boxed_only_string, remove_boxed
from slime.rollout.rm_hub.literals import Number, Row, literal, plain
from slime.rollout.rm_hub.verdict import Invalid

__all__ = [
    "boxed_answer",
    "grade_answer",
    "last_boxed_only_string",
    "math_check",
    "math_reward",
    "remove_boxed",
]

_WRAPPED = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mbox)\{([^{}]*)\}")
_UNIT = re.compile(r"\^\{?\\circ\}?|\\degree|\\$|\.$")
_LAST_EQUALS = re.compile(r"(?<![<>!\\])=(?!.*=)")


def math_check(response: str, label: str) -> float | Invalid:
    r"""1.0 if the last ``\boxed`` or ``\fbox`` of the response equals the label, else 0.0.

    Args:
        label: the answer, boxed or not.

    Returns:
        `Invalid` for a response without a box, or with something in it that is no expression.

    Raises:
        RewardError: the answer is too large to judge.
    """
    answer = boxed_answer(response)
    if answer is None:
        return Invalid(0.0, "no_box")
    return judged_answer(answer, label)


def math_reward(response: str, label: str) -> float:
    """The number alone of `math_check`."""
    verdict = math_check(response, label)
    return float(verdict.reward) if isinstance(verdict, Invalid) else verdict


def judged_answer(answer: str, label: str) -> float | Invalid:
    """1.0 or 0.0 for an answer, without its box; label and errors as for `math_check`."""
    equal = _equal(answer, boxed_answer(label) or label)
    return Invalid(0.0, "unparsable_answer") if equal is None else float(equal)


def grade_answer(answer: str, label: str) -> bool:
    """True if both expressions are equal; False for an answer that is no expression.

    Raises:
        RewardError: the answer is too large to judge.
        Exception: whatever sympy raises; it means that there is no verdict.
    """
    return bool(_equal(answer, label))


def _equal(answer: str, label: str) -> bool | None:
    """Whether both are equal, None where the answer is no expression: the cheap ways first."""
    short, gold_short = plain(answer), plain(label)
    if short == gold_short or not short:
        return True if short else None
    number, gold_number = literal(short), literal(gold_short)
    decided = _by_number(number, gold_number)
    if decided is not None:
        return decided
    expressions.check_size(short)
    text, gold_text = (expressions.normalised(" ".join(side.split())) for side in (answer, label))
    if plain(text) == plain(gold_text) != "":
        return True
    number, gold_number = number or _bare_number(text), gold_number or _bare_number(gold_text)
    decided = _by_number(number, gold_number)
    if decided is not None:
        return decided
    if isinstance(gold_number, Number) and gold_number.is_integer:
        percent = _bare_number(text.replace("%", ""))
        return isinstance(percent, Number) and percent.equals(gold_number)
    return _by_algebra(text, gold_text)


def _by_number(answer: Number | Row | None, gold: Number | Row | None) -> bool | None:
    """The verdict where both are literals; None where that says nothing."""
    if isinstance(answer, Number) and isinstance(gold, Number):
        return answer.equals(gold)
    if isinstance(answer, Row) and isinstance(gold, Row) and answer.opening == gold.opening:
        return answer.equals(gold)
    unreduced = any(isinstance(side, Number) and side.unreduced for side in (answer, gold))
    return False if unreduced else None


def _bare_number(text: str) -> Number | Row | None:
    r"""The literal in a normalised text, without ``x =``, degrees and ``\text``; a percentage is none."""
    text = _LAST_EQUALS.split(text)[-1] if "," not in text else text
    return literal(_UNIT.sub("", plain(_WRAPPED.sub(r"\1", text))))


def _by_algebra(answer: str, label: str) -> bool | None:
    gold = expressions.read(label)
    if gold is None:
        return _words(answer) == _words(label)
    found = expressions.read(answer)
    return None if found is None else expressions.equal(gold, found)


def _words(text: str) -> list[str]:
    """The words of a label that is no expression, whatever wraps them."""
    return re.findall(r"\w+", _WRAPPED.sub(r"\1", text).lower())

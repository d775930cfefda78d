"""The math reward of DeepScaleR: only the part after the reasoning counts, and it must hold a box.

Pure functions of two texts; they run in a worker process. Knows no mathematics: `math_utils` judges.
"""

from __future__ import annotations

from slime.rollout.rm_hub.boxed import boxed_answer
from slime.rollout.rm_hub.math_utils import judged_answer
from slime.rollout.rm_hub.verdict import Invalid

THINK_END = "</think>"
RESPONSE_START = "###Response"


def get_deepscaler_rule_based_reward(response: str, label: str | int | float) -> float:
    """The number alone of `deepscaler_check`; 0.0 for an empty label."""
    if str(label).strip() == "":
        return 0.0
    verdict = deepscaler_check(response, str(label))
    return float(verdict.reward) if isinstance(verdict, Invalid) else verdict


def deepscaler_check(response: str, label: str) -> float | Invalid:
    r"""1.0 if the last box after ``</think>`` (or ``###Response``) equals the label, else 0.0.

    Args:
        label: the answer, boxed or not.

    Returns:
        `Invalid` where reasoning does not end, there is no box, or it holds no expression.

    Raises:
        RewardError: the answer is too large to judge.
    """
    answer = solution_part(response)
    if answer is None:
        return Invalid(0.0, "reasoning_not_ended")
    boxed = boxed_answer(answer)
    return Invalid(0.0, "no_box") if boxed is None else judged_answer(boxed, label)


def solution_part(response: str) -> str | None:
    """What follows the last ``</think>``, else ``###Response``; None without either."""
    for mark in (THINK_END, RESPONSE_START):
        _, found, after = response.rpartition(mark) if mark == THINK_END else response.partition(mark)
        if found:
            return after
    return None

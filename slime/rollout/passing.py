"""When a rollout passes, and what follows from it: pass@k. Pure arithmetic on rewards.

Invariant: a reward that is neither 0 nor 1 passes or not only by a threshold that the user gave.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence


def has_passed(reward: float, threshold: float | None) -> bool | None:
    """Whether a reward passes; None where that is not said.

    Args:
        threshold: ``--pass-threshold``; without one, rewards are 0 or 1.
    """
    if threshold is not None:
        return reward >= threshold
    return bool(reward) if reward in (0.0, 1.0) else None


def pass_at_k(correct: int, total: int, k: int) -> float:
    """Unbiased estimate of the chance that one of `k` answers is correct: 1 - C(n - c, k) / C(n, k).

    Source: Chen et al., "Evaluating Large Language Models Trained on Code", arXiv:2107.03374, equation 1.

    Args:
        correct: c, the answers that pass.
        total: n, all answers; at least `k`.
    """
    return 1.0 - math.comb(total - correct, k) / math.comb(total, k)


def pass_rates(groups: Iterable[Sequence[bool]]) -> dict[int, float]:
    """pass@k for k = 1, 2, 4, ... up to the rollouts of a prompt, each the mean over prompts with k rollouts.

    Args:
        groups: for each prompt, whether each of its rollouts passed.
    """
    filled = [(sum(group), len(group)) for group in groups if group]
    most = max((total for _, total in filled), default=0)
    rates = {}
    for k in (2**power for power in range(most.bit_length())):
        large = [pass_at_k(correct, total, k) for correct, total in filled if total >= k]
        rates[k] = math.fsum(large) / len(large)
    return rates

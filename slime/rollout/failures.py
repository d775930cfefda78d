"""The failure budget of a step: how many rollouts failed and why, and when that is too much.

Invariant: the share is of at least the rollouts that the step wants, so that failures, which come early,
cannot stop a run before they really are too many.
"""

from __future__ import annotations

import logging
from collections import Counter

from slime.errors import RolloutFailedError
from slime.rollout.outcome import Failed, Rollout, failure_reason

logger = logging.getLogger(__name__)
SHOWN_REASONS = 5


class FailureBudget:
    """Counts of one step.

    Args:
        max_ratio: ``--max-failed-rollout-ratio``.
        planned: rollouts that the step wants.
    """

    def __init__(self, *, max_ratio: float, planned: int, step: int) -> None:
        self._max_ratio = max_ratio
        self._planned = planned
        self._step = step
        self._finished = 0
        self._reasons: Counter[str] = Counter()
        self._examples: dict[str, str] = {}

    @property
    def failed(self) -> int:
        """Rollouts that failed so far."""
        return self._reasons.total()

    def record(self, rollouts: list[Rollout]) -> None:
        """Count finished rollouts; the first failure of each kind is logged in full."""
        self._finished += len(rollouts)
        for rollout in rollouts:
            reason = failure_reason(rollout.outcome)
            if reason is None:
                continue
            self._reasons[reason] += 1
            if reason not in self._examples:
                self._examples[reason] = _example(rollout)
                logger.warning("%s: %s", reason, self._examples[reason], exc_info=rollout.error)

    def check(self) -> None:
        """Stop when too many failed.

        Raises:
            RolloutFailedError: with the commonest reasons and an example of each.
        """
        allowed = self._max_ratio * max(self._finished, self._planned)
        if self.failed > allowed:
            raise RolloutFailedError(
                f"{self.failed} of {self._finished} finished rollouts failed{self.summary()}",
                place=f"rollout step {self._step}",
                remedy=f"mend the cause, or raise --max-failed-rollout-ratio (now {self._max_ratio:g})",
            )

    def summary(self) -> str:
        """One line a reason, most frequent first."""
        lines = [
            f"\n  {count} x {reason}, e.g. {self._examples[reason]}"
            for reason, count in self._reasons.most_common(SHOWN_REASONS)
        ]
        return "".join(lines)


def _example(rollout: Rollout) -> str:
    outcome = rollout.outcome
    detail = f" in {outcome.place}: {outcome.detail}" if isinstance(outcome, Failed) else ""
    return f"rollout {rollout.rollout_id}{detail}"

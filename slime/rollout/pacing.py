"""How old a trained token may be, and what follows: when groups may start, and which a batch may take.

A group that starts under weights `version` is due in step `version + max_staleness` at the latest. Invariant:
at any time all groups that are out can still be taken by their due step, `wanted` a step (earliest deadline
first is feasible), so that no group has to be dropped for its age. Pure; after arXiv:2505.24298, section 5.1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

UNBOUNDED = 1 << 30
ENOUGH = 16
"""Durations from which a share of them means something."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pacing:
    """The bound of a run.

    Attributes:
        wanted: groups that each step takes.
        max_staleness: most weight updates between the oldest token of a group and its training; None is no
            bound.
    """

    wanted: int
    max_staleness: int | None

    def due(self, version: int) -> int:
        """The last step that may train tokens of this weight version."""
        return UNBOUNDED if self.max_staleness is None else version + self.max_staleness

    def room(self, step: int, due: int, dues: Sequence[int]) -> int:
        """Groups with this due step that may start while `step` is collected.

        Args:
            dues: due steps of all groups that are out: running, finished, or in the batch of `step`.
        """
        if self.max_staleness is None:
            return UNBOUNDED
        return min(
            (until - step + 1) * self.wanted - sum(other <= until for other in dues)
            for until in {due, *(other for other in dues if other > due)}
        )

    def may_take(self, step: int, due: int, accepted: Sequence[int], out: Sequence[int]) -> bool:
        """Whether the batch of `step` has a place for a finished group, besides those that it must take.

        Args:
            accepted: due steps of the groups in the batch.
            out: due steps of all groups outside of it, this one too.
        """
        if self.max_staleness is None:
            return True
        left = self.wanted - len(accepted) - 1
        return all(
            left >= self._must_take(step, until, accepted, out)
            for until in {other for other in (*accepted, *out) if other < due}
        )

    def _must_take(self, step: int, until: int, accepted: Sequence[int], out: Sequence[int]) -> int:
        """Groups due by `until` that the batch still needs, since later steps have no room for all."""
        due = sum(other <= until for other in (*accepted, *out))
        later = max(until - step, 0) * self.wanted
        return max(0, due - later) - sum(other <= until for other in accepted)


def late_after(durations: Sequence[float], percentile: float) -> float:
    """The seconds that this share of the rollouts stayed within; infinite where they are too few."""
    if percentile >= 1 or len(durations) < ENOUGH:
        return math.inf
    return sorted(durations)[min(int(percentile * len(durations)), len(durations) - 1)]

"""What comes of a reward check: a typed verdict, and how often each came.

`Invalid` is a judgement: the response holds no answer of the form that the type reads, which the published
metrics score as wrong; it has that reward, and is counted. `Failed` is none: the check broke, and the rollout
fails (law 4). Invariant: every verdict of a training rollout is counted once in `VERDICTS`.
"""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass
from typing import Any, TypeAlias

from slime.errors import HookError, RewardError

PREFIX = "rollout/reward/"


@dataclass(frozen=True, slots=True)
class Valid:
    """The answer was judged: a finite number, a list of them, or a dict with either under a reward key."""

    reward: Any


@dataclass(frozen=True, slots=True)
class Invalid:
    """There was no answer to judge, e.g. no box; `reward` is what that scores. A hook may return one too.

    Attributes:
        reason: short and of few values, e.g. ``no_box``.
    """

    reward: Any
    reason: str


@dataclass(frozen=True, slots=True)
class Failed:
    """The check raised, hung or crashed, or gave something that is no reward."""

    error: Exception

    @property
    def reason(self) -> str:
        """Short and of few values, e.g. ``timeout``."""
        return failure_kind(self.error)


Verdict: TypeAlias = Valid | Invalid | Failed


def failure_kind(error: BaseException) -> str:
    """The name under which an error counts: its reason, or the class of what user code raised."""
    if isinstance(error, RewardError) and error.reason is not None:
        return error.reason
    cause = error.__cause__ if isinstance(error, HookError) and error.__cause__ else error
    return type(cause).__name__


class Tally:
    """Counts of verdicts since they were last taken; used by several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def record(self, verdict: Verdict) -> None:
        """Count one verdict."""
        names = ["valid"]
        if isinstance(verdict, Invalid | Failed):
            kind = "invalid" if isinstance(verdict, Invalid) else "failed"
            names = [kind, f"{kind}/{verdict.reason}"]
        with self._lock:
            self._counts.update(names)

    def take(self) -> dict[str, float]:
        """``rollout/reward/...`` metrics of what was counted, which is forgotten then."""
        with self._lock:
            counts, self._counts = self._counts, Counter()
        if not counts:
            return {}
        totals = dict.fromkeys(("valid", "invalid", "failed"), 0)
        return {PREFIX + name: float(count) for name, count in (totals | counts).items()}


VERDICTS = Tally()
"""Verdicts on the training rollouts of this process; the step that logs takes them."""

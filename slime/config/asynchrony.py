"""Combinations of flags under which rollouts and training cannot overlap."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from slime.config.problem import Problem

if TYPE_CHECKING:
    from slime.config import Config


def asynchrony(config: Config, given: frozenset[str]) -> Iterator[Problem]:
    """What keeps overlapping rollouts from going on."""
    if not config.overlaps:
        return
    if config.train.deterministic_mode:
        yield Problem(
            "--deterministic-mode",
            "excludes asynchronous rollouts: which weights sample which token is a matter of time",
            "leave one of them out",
        )
    if config.rollout.max_staleness == 0:
        yield Problem(
            "--max-staleness",
            "0 lets no rollout go on while the trainer trains",
            "at least 1, or the default rollout function without --async-training",
        )
    if config.is_fully_async and config.run.debug_rollout_only:
        yield Problem(
            "--rollout-function-path",
            "fully asynchronous rollouts wait for new weights, which nobody makes with --debug-rollout-only",
            "the default rollout function",
        )

"""Sampling seeds: one for each engine call of a rollout, the same whenever the run is repeated.

Invariant: the n-th engine call of a try of a rollout has the same seed in every run, and no two calls of a
rollout have one seed, so that a hook that asks twice gets two answers, and a rollout that failed by its
answer gets another at its next try. Knows nothing of engines or samples.
"""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import numpy as np

SEEDS = 2**31
CALL_STRIDE = 0x9E3779B1
"""2^32 by the golden ratio, odd: the calls of rollouts with neighbouring indices stay far apart."""
CALLS_OF_A_TRY = 2**20
"""Each try of a rollout takes this many seeds further along the same row of seeds."""


class CallSeeds:
    """The seeds of one rollout, call by call.

    Args:
        run_seed: ``--rollout-seed``.
        index: of the rollout's sample.
        attempt: tries of the rollout before this one.
    """

    def __init__(self, run_seed: int, index: int, attempt: int = 0) -> None:
        self.first = (run_seed * 1_000_003 + index) % SEEDS
        self._calls = itertools.count(attempt * CALLS_OF_A_TRY)

    def next(self) -> int:
        """The seed of the next call, in [0, 2^31)."""
        return (self.first + next(self._calls) * CALL_STRIDE) % SEEDS


_current: ContextVar[CallSeeds | None] = ContextVar("slime_call_seeds", default=None)


@contextlib.contextmanager
def call_seeds(seeds: CallSeeds | None) -> Iterator[None]:
    """Engine calls inside take their seeds from here; a rollout within itself goes on counting."""
    outer = _current.get()
    nested = outer is not None and seeds is not None and outer.first == seeds.first
    token = _current.set(outer if nested else seeds)
    try:
        yield
    finally:
        _current.reset(token)


def with_call_seed(sampling_params: dict[str, Any]) -> dict[str, Any]:
    """The parameters of one engine call; a seed that is set already stays."""
    seeds = _current.get()
    if seeds is None or sampling_params.get("sampling_seed") is not None:
        return sampling_params
    return sampling_params | {"sampling_seed": seeds.next()}


def seed_process(run_seed: int, step: int) -> None:
    """Seed Python's and numpy's global generators, from which hooks may draw, for one rollout step.

    What they give then depends on the step only, and not on what was drawn before it: a resumed run needs
    nothing of them.
    """
    seed = CallSeeds(run_seed, step).first
    random.seed(seed)
    np.random.seed(seed)

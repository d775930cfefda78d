"""Who holds the devices when engines and trainer take turns: the states of a run, and the steps between them.

Invariant: a step that does not lead on from the present state raises before anything is done, and after one
that failed none does; so engines never generate while the trainer trains, except where rollouts overlap
training on devices of their own. Knows order; knows no engines and no memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum

from slime.errors import SlimeError


class Holder(Enum):
    """Who holds the devices."""

    ROLLOUT = "engines generate, the trainer sleeps"
    NOBODY = "engines are paused, the trainer sleeps"
    TRAINING = "the trainer is awake, engines are paused"
    BOTH = "engines generate while the trainer trains"
    UNKNOWN = "a step between two states failed"


class OutOfTurnError(SlimeError):
    """A step that does not lead on from where the run is."""


class DeviceTurns:
    """The turns of one run. Each step is a block: what is to be done in it, is done when it ends.

    Args:
        generates: there are engines. They start awake, and the trainer asleep.
        overlaps: engines and trainer have devices of their own.
    """

    def __init__(self, *, generates: bool, overlaps: bool = False) -> None:
        self.holder = Holder.ROLLOUT if generates else Holder.NOBODY
        self._overlaps = overlaps

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Engines stop generating, and give up memory that the trainer needs."""
        self._need("hold", Holder.ROLLOUT)
        with self._between(Holder.NOBODY):
            yield

    @contextmanager
    def training(self) -> Iterator[None]:
        """The trainer wakes, loads or trains, and sleeps again."""
        alone = Holder.TRAINING
        if self._overlaps and self.holder is Holder.ROLLOUT:
            alone = Holder.BOTH
        else:
            self._need("training", Holder.NOBODY)
        with self._between(self.holder, during=alone):
            yield

    @contextmanager
    def update(self) -> Iterator[bool]:
        """Engines take memory for weights, weights, and the rest of their memory; then they generate.

        The block gets whether they were held before, and have memory to take.
        """
        self._need("update", Holder.NOBODY, Holder.ROLLOUT)
        held = self.holder is Holder.NOBODY
        with self._between(Holder.ROLLOUT):
            yield held

    def _need(self, step: str, *states: Holder) -> None:
        if self.holder not in states:
            wanted = ", or ".join(state.value for state in states)
            raise OutOfTurnError(
                f"needs that {wanted}; now {self.holder.value}", place=f"{step} of the devices"
            )

    @contextmanager
    def _between(self, after: Holder, during: Holder = Holder.UNKNOWN) -> Iterator[None]:
        self.holder, ended = during, Holder.UNKNOWN
        try:
            yield
            ended = after
        finally:
            self.holder = ended

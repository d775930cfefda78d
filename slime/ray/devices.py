"""Who holds the devices when engines and trainer take turns: the states of a run, and the calls between them.

Invariant: engine and trainer are never both awake, except where they have devices of their own; a step that
does not lead on from the present state raises before anything is called. Knows order, and no engines.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Protocol

from slime.errors import SlimeError

WEIGHTS, CACHE = ("weights",), ("kv_cache", "cuda_graph")
"""Tags of what an engine gives up, in the order in which it comes back: weights are needed for the update,
the rest only to generate."""


class Holder(Enum):
    """Who holds the devices."""

    ROLLOUT = "engines generate, the trainer sleeps"
    NOBODY = "engines are paused, the trainer sleeps"
    TRAINING = "the trainer trains, engines are paused"
    UPDATE = "engines take weights, the trainer sleeps"
    UNKNOWN = "a step between two states failed"


class EnginesSide(Protocol):
    """All engines of the run that the trainer takes turns with."""

    def pause(self) -> None:
        """End what is generated, and begin nothing."""
        ...

    def go_on(self) -> None:
        """Generate again."""
        ...

    def release_memory(self, tags: tuple[str, ...]) -> None:
        """Give up memory; on GPUs that a trainer shares."""
        ...

    def resume_memory(self, tags: tuple[str, ...]) -> None:
        """Take it back."""
        ...


class TrainerSide(Protocol):
    """All ranks of the trainer."""

    def sleep(self) -> None:
        """Give up the device; what is needed again stays on the host."""
        ...

    def wake(self) -> None:
        """Take it back."""
        ...


class OutOfTurnError(SlimeError):
    """A step that does not lead on from where the run is."""


class DeviceTurns:
    """The turns of one run.

    A step of training is `hold`, `begin_training`, `end_training`, `begin_update`, `begin_rollout`. A trainer
    is loaded between `hold` and `end_training` too, with `trainer_is_loaded` in place of `begin_training`.

    Args:
        offload_rollout: engines give up their memory while they are paused.
        offload_train: the trainer gives up its own while it does not train.
    """

    def __init__(
        self,
        engines: EnginesSide,
        trainer: TrainerSide,
        *,
        offload_rollout: bool,
        offload_train: bool,
    ) -> None:
        self._engines, self._trainer = engines, trainer
        self._offload_rollout, self._offload_train = offload_rollout, offload_train
        self.holder = Holder.ROLLOUT
        """Engines start awake, and alone."""

    def hold(self) -> None:
        """Engines stop generating, and give up their memory."""
        self._step("hold", Holder.ROLLOUT, Holder.NOBODY, self._pause)

    def trainer_is_loaded(self) -> None:
        """The trainer came up on the devices: it is awake, though nothing woke it."""
        self._step("trainer_is_loaded", Holder.NOBODY, Holder.TRAINING, lambda: None)

    def begin_training(self) -> None:
        """The trainer wakes."""
        self._step("begin_training", Holder.NOBODY, Holder.TRAINING, self._wake)

    def end_training(self) -> None:
        """The trainer sleeps; its weights can still be read."""
        self._step("end_training", Holder.TRAINING, Holder.NOBODY, self._sleep)

    def begin_update(self) -> None:
        """Engines take memory for weights."""
        self._step("begin_update", Holder.NOBODY, Holder.UPDATE, lambda: self._resume(WEIGHTS))

    def begin_rollout(self) -> None:
        """Engines take the rest of their memory, and generate."""
        self._step("begin_rollout", Holder.UPDATE, Holder.ROLLOUT, self._continue)

    def _step(self, name: str, before: Holder, after: Holder, act: Callable[[], None]) -> None:
        if self.holder is not before:
            raise OutOfTurnError(
                f"{name} needs that {before.value}; now {self.holder.value}", place="devices of the run"
            )
        self.holder = Holder.UNKNOWN
        act()
        self.holder = after

    def _pause(self) -> None:
        self._engines.pause()
        if self._offload_rollout:
            self._engines.release_memory(WEIGHTS + CACHE)

    def _wake(self) -> None:
        if self._offload_train:
            self._trainer.wake()

    def _sleep(self) -> None:
        if self._offload_train:
            self._trainer.sleep()

    def _resume(self, tags: tuple[str, ...]) -> None:
        if self._offload_rollout:
            self._engines.resume_memory(tags)

    def _continue(self) -> None:
        self._resume(CACHE)
        self._engines.go_on()

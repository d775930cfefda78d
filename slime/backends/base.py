"""The `Trainer` interface: what a training backend does, in terms that a laptop and a cluster share.

Knows samples, advantages and metrics; knows nothing of engines, Ray or where rollouts come from.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from slime.train.batch import TrainSample

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """One row of an optimizer step.

    Attributes:
        advantages, old_log_probs, ref_log_probs: one per response token. `old_log_probs` None means that the
            step is exactly on-policy and the current log-probs, detached, are the old ones.
        sequence_log_ratio: mean of log pi - log pi_old over the trained tokens of the row's rollout, at the
            start of the step; 0.0 where the step is exactly on-policy.
        correction: factor of the policy-gradient term, one per response token, settled over the whole step;
            None is 1.
        stale: an older policy than the newest of the batch sampled it, so its old log-probs are the engine's.
        weight: factor on the sum of this row's masked token losses. Weights are computed over the whole step
            before packing, so the loss of the step is the plain sum over rows and does not depend on cuts.
    """

    sample: TrainSample
    advantages: tuple[float, ...]
    weight: float
    old_log_probs: tuple[float, ...] | None = None
    ref_log_probs: tuple[float, ...] | None = None
    sequence_log_ratio: float = 0.0
    correction: tuple[float, ...] | None = None
    stale: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueRow:
    """One row of a critic's optimizer step.

    Attributes:
        returns, old_values: value targets, and the values from which they were made; one per response token,
            of which only those of trained tokens are read.
        weight: as in `StepRow`.
    """

    sample: TrainSample
    returns: tuple[float, ...]
    old_values: tuple[float, ...]
    weight: float


class Trainer(Protocol):
    """A model under training."""

    @property
    def precision(self) -> str:
        """What it computes in: ``float32`` or ``bfloat16``."""
        ...

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        ...

    def log_probs(self, samples: Sequence[TrainSample], *, reference: bool = False) -> list[list[float]]:
        """Log-probs of the response tokens, one list a sample, under the current or the reference model."""
        ...

    def step(self, rows: Sequence[StepRow]) -> dict[str, float]:
        """One optimizer step over all rows; returns metrics (``train/...`` names without the prefix)."""
        ...

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Current weights by Hugging Face name, tied weights once. Of a trainer that sleeps: in `present`."""
        ...

    def present(self) -> AbstractContextManager[None]:
        """Within it `weights` can be gone through also while the trainer sleeps."""
        ...

    def save(self, folder: Path) -> None:
        """Write weights, optimizer, schedule and RNG state below `folder`."""
        ...

    def load(self, folder: Path, *, restart_at: int | None = None) -> None:
        """Inverse of `save`.

        Args:
            restart_at: take the weights only, with a fresh optimizer at this step of the schedule.
        """
        ...

    def save_hf(self, folder: Path) -> None:
        """Write a folder that `AutoModelForCausalLM.from_pretrained` loads, tokenizer included."""
        ...

    def sleep(self) -> None:
        """Give up everything that a rollout phase does not need: gradients, caches, threads, a GPU's memory.

        Until `wake` nothing else may be called but `present`, and `weights` within it.
        """
        ...

    def wake(self) -> None:
        """Undo `sleep`."""
        ...


class Critic(Protocol):
    """A value model under training (PPO)."""

    def values(self, samples: Sequence[TrainSample]) -> list[list[float]]:
        """Value of the state before each response token, one list a sample; 0.0 where the mask is 0."""
        ...

    def step(self, rows: Sequence[ValueRow]) -> dict[str, float]:
        """One optimizer step over all rows; returns metrics (``train/critic-...`` without the prefix)."""
        ...

    def save(self, folder: Path) -> None:
        """Write weights, optimizer, schedule and RNG state below `folder`."""
        ...

    def load(self, folder: Path, *, restart_at: int | None = None) -> None:
        """Inverse of `save`; `restart_at` as in `Trainer.load`."""
        ...

    def save_hf(self, folder: Path) -> None:
        """Write a folder from which another run's critic can start."""
        ...

    def sleep(self) -> None:
        """Give up gradients, caches and a GPU's memory, until the next call."""
        ...

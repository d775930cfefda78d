"""A model under training on disk and at rest: parameters, optimizer and random states.

Invariant: parameters keep their storage through a load. Knows parameters by name; knows no model and no loss.
"""

from __future__ import annotations

import gc
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from slime.backends.torch.checkpoint import Checkpoint, StoredTensor, read_checkpoint, write_checkpoint
from slime.backends.torch.lora import check_settings
from slime.backends.torch.memory import release_heap
from slime.backends.torch.optim import Optimizer
from slime.backends.torch.parking import Parking
from slime.backends.torch.ranks import ALONE, Ranks
from slime.backends.torch.sharding import own, own_rows
from slime.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class TrainingState:
    """What changes from step to step.

    Attributes:
        parameters: those that train, by name, tied ones once.
        keeps_optimizer: whether checkpoints hold the optimizer's state.
        adapters: what a checkpoint's adapters must agree on; see `LoraAdapters.settings`.
        ranks: those over which the parameters are spread; all of them save and load together.
    """

    parameters: Mapping[str, torch.nn.Parameter]
    optimizer: Optimizer
    keeps_optimizer: bool
    adapters: Mapping[str, Any] | None = None
    ranks: Ranks = ALONE

    def save(self, folder: Path) -> None:
        """Write weights, optimizer, schedule position and RNG state below `folder`.

        Raises:
            CheckpointError: see `write_checkpoint`; nothing in memory is harmed.
        """
        optimizer = self.optimizer.state_tensors() if self.keeps_optimizer else {}
        counters = {
            "optimizer_steps": self.optimizer.steps,
            "moment_steps": self.optimizer.moment_steps,
            "skipped_in_a_row": self.optimizer.skipped_in_a_row,
            "optimizer_state": self.keeps_optimizer,
            "lora": self.adapters,
        }
        weights = {name: parameter.detach() for name, parameter in self.parameters.items()}
        write_checkpoint(folder, Checkpoint(weights, optimizer, _rng_states(), counters), self.ranks)

    def load(self, folder: Path, *, restart_at: int | None = None) -> None:
        """Read a checkpoint into the present storage of the parameters; see `Trainer.load`.

        Each rank reads the rows that it holds, whichever ranks wrote them. A rank that the writers did not
        have keeps its random states.

        Raises:
            CheckpointError: no checkpoint, one of another model, or one without optimizer state where this
                run was not told to do without (``--no-save-optim``).
        """
        saved = read_checkpoint(folder)
        if self.keeps_optimizer and restart_at is None and not saved.counters["optimizer_state"]:
            raise CheckpointError(
                "it has no optimizer state",
                place=str(folder),
                remedy="give --no-save-optim to start a fresh one",
            )
        check_settings(self.adapters, saved.counters.get("lora"), folder)
        _check_same_weights(self.parameters, saved.weights, folder)
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                own(parameter).copy_(saved.weights[name].rows(*own_rows(parameter)))
        if restart_at is not None:
            self.optimizer.load_state({}, steps=restart_at, moment_steps=0)
        else:
            counters = saved.counters
            self.optimizer.load_state(
                self._own_moments(saved.optimizer),
                steps=counters["optimizer_steps"],
                moment_steps=counters["moment_steps"],
            )
            self.optimizer.skipped_in_a_row = counters["skipped_in_a_row"]
        if self.ranks.rank < len(saved.rng):
            _restore_rng(saved.rng[self.ranks.rank])

    def _own_moments(self, stored: Mapping[str, StoredTensor]) -> dict[str, torch.Tensor]:
        return {
            name: tensor.rows(*own_rows(self.parameters[name.split(".", 1)[1]]))
            for name, tensor in stored.items()
        }

    def rest(self, parking: Parking) -> None:
        """Drop gradients, park the optimizer's moments, and give freed memory back where the system is short
        of it."""
        self.optimizer.zero_grad()
        parking.park(self.optimizer.state_tensors().values())
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        release_heap()


def _check_same_weights(
    parameters: Mapping[str, torch.Tensor], saved: Mapping[str, StoredTensor], folder: Path
) -> None:
    for name in sorted(parameters.keys() | saved.keys()):
        ours, theirs = parameters.get(name), saved.get(name)
        if ours is None or theirs is None or tuple(ours.shape) != theirs.shape:
            shapes = [None if t is None else tuple(t.shape) for t in (ours, theirs)]
            raise CheckpointError(
                f"it is of another model: {name} is {shapes[1]} there and {shapes[0]} here", place=str(folder)
            )


def seed_generators(seed: int) -> None:
    """Seed all global random generators of this process: torch's, numpy's and Python's."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def _rng_states() -> dict[str, torch.Tensor]:
    states = {"torch": torch.get_rng_state()}
    numpy_state: Any = np.random.get_state()
    states["numpy_keys"] = torch.from_numpy(numpy_state[1].astype(np.int64))
    states["numpy_rest"] = torch.tensor([numpy_state[2], numpy_state[3], numpy_state[4]], dtype=torch.float64)
    version, words, next_gauss = random.getstate()
    states["python_words"] = torch.tensor(words, dtype=torch.int64)
    states["python_rest"] = torch.tensor(
        [version, math.nan if next_gauss is None else next_gauss], dtype=torch.float64
    )
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def _restore_rng(states: Mapping[str, torch.Tensor]) -> None:
    torch.set_rng_state(states["torch"])
    position, has_gauss, gauss = states["numpy_rest"].tolist()
    keys = states["numpy_keys"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", keys, int(position), int(has_gauss), gauss))
    version, next_gauss = states["python_rest"].tolist()
    words = tuple(states["python_words"].tolist())
    random.setstate((int(version), words, None if math.isnan(next_gauss) else next_gauss))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])

"""The critic of PPO on PyTorch: values of trained tokens, and steps towards their returns.

Invariant: the loss of a step is the sum over its rows of weight times value losses of the trained tokens,
whatever the micro-batches, packing or prefix sharing. Knows rows and returns; knows no rewards and no policy.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from slime.backends.base import ValueRow
from slime.backends.torch.batches import MicroBatches, loss_request
from slime.backends.torch.checkpoint import tensor_bytes, write_folder
from slime.backends.torch.forest import Request
from slime.backends.torch.optim import Optimizer
from slime.backends.torch.parking import Parking
from slime.backends.torch.ranks import ALONE, Ranks
from slime.backends.torch.recompute import recompute_layers
from slime.backends.torch.sharding import sharded, whole
from slime.backends.torch.state import TrainingState
from slime.backends.torch.value_model import load_value_model
from slime.config.sections import ModelConfig
from slime.config.training_sections import CriticConfig, TrainConfig
from slime.errors import ConfigError, DataError, ModelError
from slime.train.batch import TrainSample
from slime.train.packing import Packing
from slime.train.value_loss import value_losses
from slime.utils.processing_utils import load_tokenizer


class TorchCritic:
    """A value model and its optimizer."""

    def __init__(
        self,
        model: ModelConfig,
        critic: CriticConfig,
        train: TrainConfig,
        *,
        value_clip: float,
        total_steps: int,
        device: str | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        """Load the model.

        Args:
            train: of the actor; `critic` overrides what it sets.
            value_clip: see `value_losses`.
            total_steps, device, ranks: as in `TorchTrainer`.

        Raises:
            ModelError: a model folder cannot be used, or the critic does not know the actor's tokens.
            ConfigError: a dynamic batch size without a budget, no model, or no such device.
        """
        folder = critic.load or model.hf_checkpoint
        if folder is None or model.hf_checkpoint is None:
            raise ConfigError("training needs a model", place="--hf-checkpoint")
        own = critic.train_config(train)
        self._clip = value_clip
        self._tokenizer = load_tokenizer(model.hf_checkpoint)
        self._model = load_value_model(folder, precision=train.train_precision, device=device)
        known, asked = self._model.body.get_input_embeddings().num_embeddings, len(self._tokenizer)
        if known < asked:
            raise ModelError(
                f"it knows {known} tokens, the actor's tokenizer has {asked}",
                place=f"--critic-load {folder}",
                remedy="name a model with the actor's tokenizer",
            )
        if train.gradient_checkpointing:
            recompute_layers(self._model.body)
        self._ranks = ranks
        self._parking = Parking()
        self._batches = MicroBatches.of(own, self._model.body.config, device=self._model.device, ranks=ranks)
        self._values = sharded(self._model.module, self._model.values, ranks, self._model.device)
        parameters = dict(self.named_parameters())
        self._optimizer = Optimizer(parameters, own, total_steps)
        self._state = TrainingState(
            parameters, self._optimizer, keeps_optimizer=not model.no_save_optim, ranks=ranks
        )

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Trained parameters by Hugging Face name."""
        yield from self._model.module.named_parameters()

    def values(self, samples: Sequence[TrainSample]) -> list[list[float]]:
        """Values of the states before the trained tokens; see `Critic.values`.

        Raises:
            DataError: a sample whose response has no token before it.
        """
        self._parking.restore()
        requests = [(i, _request(sample)) for i, sample in enumerate(samples) if sample.trained_tokens]
        found: dict[int, list[float]] = {}
        with torch.no_grad():
            for members, batch in self._batches.pack(requests):
                rows = torch.split(self._values(batch).cpu(), list(batch.row_sizes))
                for index, row in zip(members, rows, strict=True):
                    trained = iter(row.tolist())
                    found[index] = [next(trained) if flag else 0.0 for flag in samples[index].loss_mask]
        everyone = {index: row for rows in self._ranks.gather(found) for index, row in rows.items()}
        return [everyone.get(i, [0.0] * sample.response_length) for i, sample in enumerate(samples)]

    def step(self, rows: Sequence[ValueRow]) -> dict[str, float]:
        """One optimizer step over all rows; see `Critic.step`.

        Raises:
            DataError: per-token lists of a row that do not fit or are not finite.
            NonFiniteGradientError: gradients were not finite several times in a row.
        """
        rows = [row for row in rows if row.sample.trained_tokens]
        _check_rows(rows)
        self._parking.restore()
        self._optimizer.zero_grad()
        sums: dict[str, float] = defaultdict(float)
        for members, batch in self._batches.pack([(i, _request(r.sample)) for i, r in enumerate(rows)]):
            chosen = [rows[i] for i in members]
            weight = self._column(chosen, [[row.weight] * row.sample.response_length for row in chosen])
            losses, metrics = value_losses(
                self._values(batch),
                self._column(chosen, [row.old_values for row in chosen]),
                self._column(chosen, [row.returns for row in chosen]),
                clip=self._clip,
            )
            (losses * weight).sum().backward()  # type: ignore[no-untyped-call]
            for name, value in metrics.items():
                sums[name] += (value * weight).sum().item()
        outcome = self._optimizer.step()
        return _total(self._ranks.gather(sums)) | {
            "grad_norm": outcome.grad_norm,
            "lr": outcome.rate,
            "skipped_step": float(outcome.skipped),
            "tokens": float(sum(row.sample.trained_tokens for row in rows)),
        }

    def pack_as(self, packing: Packing) -> None:
        """Pack otherwise from now on: another speed and memory, the same loss."""
        self._batches = replace(self._batches, packing=packing)

    def save(self, folder: Path) -> None:
        """Write weights, optimizer, schedule position and RNG state; see `TrainingState.save`."""
        self._parking.restore()
        self._state.save(folder)

    def load(self, folder: Path, *, restart_at: int | None = None) -> None:
        """Read a checkpoint into the present storage of the parameters; see `TrainingState.load`."""
        self._parking.restore()
        self._state.load(folder, restart_at=restart_at)

    def save_hf(self, folder: Path) -> None:
        """Write a Hugging Face folder with weights, config and tokenizer, which ``--critic-load`` reads.

        Raises:
            CheckpointError: see `write_checkpoint`.
        """
        self._parking.restore()
        parameters = ((name, whole(parameter.detach())) for name, parameter in self.named_parameters())
        weights = {name: weight for name, weight in parameters if self._ranks.is_first}

        def write(place: Path) -> None:
            if self._ranks.is_first:
                self._model.save_pretrained(place, weights)
                self._tokenizer.save_pretrained(place)

        write_folder(folder, write, tensor_bytes(weights), self._ranks)

    def sleep(self) -> None:
        """Drop gradients and take the model and its moments from a GPU to the host, until the next call."""
        self._parking.park(self._model.module.parameters())
        self._state.rest(self._parking)

    def _column(self, rows: Sequence[ValueRow], values: Sequence[Sequence[float]]) -> torch.Tensor:
        """[T] values of the trained tokens, rows after one another."""
        flat = [
            value
            for row, per_token in zip(rows, values, strict=True)
            for value, flag in zip(per_token, row.sample.loss_mask, strict=True)
            if flag
        ]
        return torch.tensor(flat, dtype=torch.float32, device=self._model.device)


def _request(sample: TrainSample) -> Request:
    """Asks for the tokens that train, each of which needs a state before it."""
    if not sample.prompt_length:
        raise DataError("the response has no token before it", place=f"sample {sample.index}")
    return replace(loss_request(sample), routes=None)


def _total(sums: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Of all ranks, some of which may have had no rows."""
    names = dict.fromkeys(name for rank in sums for name in rank)
    return {name: math.fsum(rank.get(name, 0.0) for rank in sums) for name in names}


def _check_rows(rows: Sequence[ValueRow]) -> None:
    for row in rows:
        sample = row.sample
        lists = {"loss_mask": sample.loss_mask, "returns": row.returns, "old_values": row.old_values}
        for name, values in lists.items():
            if len(values) != sample.response_length:
                raise DataError(
                    f"{name} has length {len(values)}, the response has {sample.response_length} tokens",
                    place=f"sample {sample.index}",
                )
            if not all(map(math.isfinite, values)):
                raise DataError(f"{name} is not finite", place=f"sample {sample.index}")
        if not math.isfinite(row.weight):
            raise DataError("the weight is not finite", place=f"sample {sample.index}")

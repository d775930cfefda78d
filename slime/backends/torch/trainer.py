"""The torch trainer: policy-gradient steps on a Hugging Face model.

Invariant: the loss of a step is the sum over its rows of weight times masked token losses, whatever the
micro-batches, packing or prefix sharing. Parameters keep their storage from step to step.
Knows rows and advantages; knows nothing of engines, rewards or where rollouts come from.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, cast, get_args

import torch

from slime.backends.base import StepRow
from slime.backends.factors import correction_rule
from slime.backends.hooks import NO_HOOKS, TrainHooks
from slime.backends.torch.batches import MicroBatches, loss_request, response_request
from slime.backends.torch.checkpoint import tensor_bytes, write_folder
from slime.backends.torch.custom_loss import CustomLoss, LogitsOf
from slime.backends.torch.forest import PackedBatch
from slime.backends.torch.lora import LoraAdapters
from slime.backends.torch.memory import keep_heap
from slime.backends.torch.model import CausalModel, load_model
from slime.backends.torch.optim import Optimizer, check_offload
from slime.backends.torch.parking import Parking
from slime.backends.torch.ranks import ALONE, Ranks
from slime.backends.torch.recompute import recompute_layers
from slime.backends.torch.replay import replay_routes
from slime.backends.torch.sharding import sharded, whole
from slime.backends.torch.state import TrainingState, seed_generators
from slime.backends.torch.step import StepSums, StepTokens, check_rows, has_gradient
from slime.config.sections import ModelConfig
from slime.config.training_sections import AlgorithmConfig, TrainConfig
from slime.errors import ConfigError
from slime.train.batch import TrainSample
from slime.train.kl import kl_type
from slime.train.memory import default_chunk
from slime.train.packing import Packing
from slime.train.policy_loss import PolicyLoss, Surrogate, policy_losses
from slime.utils.processing_utils import load_tokenizer

Score = Callable[..., tuple[torch.Tensor, torch.Tensor]]


class TorchTrainer:
    """A causal model, its optimizer and, where the loss asks for one, a frozen reference model."""

    def __init__(
        self,
        model: ModelConfig,
        algorithm: AlgorithmConfig,
        train: TrainConfig,
        *,
        temperature: float,
        total_steps: int,
        device: str | None = None,
        ranks: Ranks = ALONE,
        hooks: TrainHooks = NO_HOOKS,
    ) -> None:
        """Load the models.

        Args:
            temperature: sampling temperature of the rollouts; logits are divided by it.
            total_steps: optimizer steps of the whole run, for the schedule.
            device: of the models, e.g. ``cpu``; None is CUDA where there is a GPU, else the CPU.
            ranks: processes over which parameters and rows are spread. Each is given all rows, and calls
                every method that computes, or reads or writes weights, in the same order.
            hooks: the user's; its loss takes the place of the policy loss.

        Raises:
            ModelError: a model folder cannot be used, or its sizes do not tell what a row costs.
            ConfigError: a dynamic batch size without a budget, no model, or no such device.
        """
        if model.hf_checkpoint is None:
            raise ConfigError("training needs a model", place="--hf-checkpoint")
        self._config, self._temperature = train, temperature
        self._threads = train.train_num_threads or max(1, usable_cpus() // ranks.size)
        torch.set_num_threads(self._threads)
        keep_heap()
        seed_generators(model.seed)
        self._loss = policy_loss(algorithm)
        self._custom_loss = CustomLoss(hooks.loss, hooks.args) if hooks.loss else None
        self._gap_from_old = not algorithm.use_rollout_logprobs
        self.tokenizer = load_tokenizer(model.hf_checkpoint)
        self._model = load_model(model.hf_checkpoint, precision=train.train_precision, device=device)
        replays = algorithm.use_rollout_routing_replay
        self._replay = replay_routes(self._model, model.hf_checkpoint) if replays else None
        self._lora = LoraAdapters(self._model.module, train) if train.lora_rank else None
        if train.gradient_checkpointing:
            recompute_layers(self._model.module)
        check_offload(train, self.device, ranks.size)
        adapters = self._lora.settings() if self._lora else None  # of whole weights: before they are sharded
        self._ranks = ranks
        self._batches = MicroBatches.of(train, self._model.module.config, device=self.device, ranks=ranks)
        self._score, self._logits = self._sharded(self._model)
        self._parking = Parking()
        self._reference_module: torch.nn.Module | None = None
        self._score_reference: Score | None = None
        if algorithm.use_kl_loss or algorithm.kl_coef:
            self._score_reference = self._reference(model, device)
        parameters = dict(self.named_parameters())
        self._optimizer = Optimizer(parameters, train, total_steps)
        self._state = TrainingState(
            parameters,
            self._optimizer,
            keeps_optimizer=not model.no_save_optim,
            adapters=adapters,
            ranks=ranks,
        )

    @property
    def precision(self) -> str:
        """What matrix products are computed in: ``float32`` or ``bfloat16``."""
        return str(self._model.compute_dtype).removeprefix("torch.")

    @property
    def device(self) -> torch.device:
        """Where the parameters live."""
        return self._model.device

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Trained parameters by name (without adapters the Hugging Face name), tied ones once."""
        for name, parameter in self._model.module.named_parameters():
            if parameter.requires_grad:
                yield name, parameter

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Current weights by Hugging Face name, tied weights once: views, or copies with adapters merged.

        Of several ranks all go through them together, and each weight is gathered as its turn comes.
        """
        if self._lora is not None:
            yield from self._lora.merged()
            return
        for name, parameter in self.named_parameters():
            yield name, whole(parameter.detach())

    def alias_parameters(self, views: Mapping[str, torch.Tensor]) -> None:
        """Move the parameters into given storage: their values are copied there, and they live there.

        Weights with an adapter stay where they are: their merged value is no parameter.

        Args:
            views: a tensor of equal shape, dtype and device for every name of `weights`.

        Raises:
            ConfigError: a name is missing, or a view does not fit; no parameter was moved.
        """
        parameters = dict(self.named_parameters() if self._lora is None else self._lora.base_weights())
        for name, parameter in parameters.items():
            needed, found = _form(parameter), _form(views.get(name))
            if needed != found:
                raise ConfigError(f"needs {needed}, got {found}", place=name)
        for name, parameter in parameters.items():
            view = views[name]
            view.copy_(parameter.detach())
            parameter.data = view

    @property
    def vocabulary(self) -> int:
        """Tokens that the model knows."""
        size: int = self._model.module.config.vocab_size
        return size

    def log_probs(self, samples: Sequence[TrainSample], *, reference: bool = False) -> list[list[float]]:
        """Log-probs of all response tokens, one list a sample, under the current or the reference model.

        The current one takes the experts that the samples' routes name; the reference chooses its own.

        Raises:
            ConfigError: the reference model was not loaded.
            DataError: a sample whose response has no token before it.
        """
        score = self._score_reference if reference else self._score
        if score is None:
            raise ConfigError("the reference model is loaded only with --use-kl-loss", place="log_probs")
        requests = [response_request(sample) for sample in samples]
        if reference:
            requests = [replace(request, routes=None) for request in requests]
        elif self._replay is not None:
            self._replay.check(samples)
        found: dict[int, list[float]] = {}
        is_base = reference and score is self._score
        with torch.no_grad(), self._lora.off() if self._lora and is_base else nullcontext():
            for members, batch in self._batches.pack([(i, r) for i, r in enumerate(requests) if r.targets]):
                log_probs, _ = score(batch, temperature=self._temperature, chunk=self._chunk)
                rows = torch.split(log_probs.cpu(), list(batch.row_sizes))
                for index, values in zip(members, rows, strict=True):
                    found[index] = values.tolist()
        everyone = {index: row for rows in self._ranks.gather(found) for index, row in rows.items()}
        return [everyone.get(index, []) for index in range(len(samples))]

    def step(self, rows: Sequence[StepRow]) -> dict[str, float]:
        """One optimizer step over all rows; see `Trainer.step`.

        Rows whose loss cannot have a gradient (advantage 0 and no other term) are only evaluated, for the
        metrics.

        Raises:
            DataError: per-token lists of a row that do not fit, or engine log-probs that are missing.
            NonFiniteGradientError: gradients were not finite several times in a row.
        """
        rows = [row for row in rows if row.sample.trained_tokens]
        check_rows(rows, self._loss)
        if self._replay is not None:
            self._replay.check([row.sample for row in rows])
        self._optimizer.zero_grad()
        if self._custom_loss is not None:
            metrics = self._custom_loss.backward(rows, self._logits, self._batches)
        else:
            metrics = self._backward(rows)
        outcome = self._optimizer.step()
        return metrics | {
            "grad_norm": outcome.grad_norm,
            "lr": outcome.rate,
            "skipped_step": float(outcome.skipped),
            "rollouts": float(len({row.sample.rollout_id for row in rows})),
            "samples": float(len(rows)),
        }

    def _backward(self, rows: Sequence[StepRow]) -> dict[str, float]:
        """Gradients of the policy loss of a step, and its metrics."""
        sums = StepSums(gap_from_old=self._gap_from_old)
        for learns in (True, False):
            chosen = [row for row in rows if has_gradient(row, self._loss) == learns]
            with torch.set_grad_enabled(learns):
                for members, batch in self._batches.pack(
                    [(i, loss_request(r.sample)) for i, r in enumerate(chosen)]
                ):
                    loss = self._batch_loss([chosen[i] for i in members], batch, sums)
                    if learns:
                        loss.backward()  # type: ignore[no-untyped-call]
        return StepSums.total(self._ranks.gather(sums)).metrics()

    def save(self, folder: Path) -> None:
        """Write weights, optimizer, schedule position and RNG state; see `TrainingState.save`."""
        self._state.save(folder)

    def load(self, folder: Path, *, restart_at: int | None = None) -> None:
        """Read a checkpoint into the present storage of the parameters; see `TrainingState.load`."""
        self._state.load(folder, restart_at=restart_at)

    def save_hf(self, folder: Path) -> None:
        """Write a Hugging Face folder with weights, configs and tokenizer.

        Adapters are merged, and also lie in its subfolder ``adapter`` as peft reads them.

        Raises:
            CheckpointError: see `write_checkpoint`.
        """
        weights = {name: weight for name, weight in self.weights() if self._ranks.is_first}
        weights |= _saved_buffers(self._model.module)
        adapters = self._lora.adapters() if self._lora else {}

        def write(place: Path) -> None:
            if self._ranks.is_first:
                self._model.module.save_pretrained(place, state_dict=weights)
                self.tokenizer.save_pretrained(place)
                if self._lora is not None:
                    self._lora.save_peft(place / "adapter", adapters)

        write_folder(folder, write, tensor_bytes(weights), self._ranks)

    def save_adapter(self, folder: Path) -> None:
        """Write the adapters alone, as peft reads them; a call of all ranks.

        Raises:
            CheckpointError: see `write_checkpoint`.
            ConfigError: there are none.
        """
        if self._lora is None:
            raise ConfigError("has no adapters to write", place="--lora-rank")
        adapters = self._lora.adapters()

        def write(place: Path) -> None:
            if self._ranks.is_first and self._lora is not None:
                self._lora.save_peft(place, adapters)

        write_folder(folder, write, tensor_bytes(adapters), self._ranks)

    def pack_as(self, packing: Packing) -> None:
        """Pack otherwise from now on: another speed and memory, the same loss."""
        self._batches = replace(self._batches, packing=packing)

    def sleep(self) -> None:
        """Drop gradients, take models and moments from a GPU to the host, and use one thread.

        Freed memory goes back to the system where that is short of it.
        """
        self._parking.park(self._models())
        self._state.rest(self._parking)
        torch.set_num_threads(1)

    def wake(self) -> None:
        """Bring back what `sleep` took away, and take the threads of training again."""
        self._parking.restore()
        torch.set_num_threads(self._threads)

    def present(self) -> AbstractContextManager[None]:
        """Within it the policy is on its device, also while the trainer sleeps."""
        return self._parking.lent(self._model.module.parameters())

    def _models(self) -> Iterator[torch.Tensor]:
        """The policy and the reference model."""
        yield from self._model.module.parameters()
        if self._reference_module is not None:
            yield from self._reference_module.parameters()

    def _reference(self, model: ModelConfig, device: str | None) -> Score:
        """The frozen model of the KL term; under adapters it is the base itself, not a second copy."""
        assert model.hf_checkpoint is not None
        if self._lora is not None and model.ref_load in (None, model.hf_checkpoint):
            return self._score
        folder = model.ref_load or model.hf_checkpoint
        reference = load_model(folder, precision=self._config.train_precision, device=device)
        reference.module.requires_grad_(False)
        self._reference_module = reference.module
        return self._sharded(reference)[0]

    def _sharded(self, model: CausalModel) -> tuple[Score, LogitsOf]:
        """The model's two answers, both through the one root that its parameters are spread below."""
        run = sharded(model.module, _call, self._ranks, model.device)
        return functools.partial(run, model.log_probs), functools.partial(run, model.logits)

    @property
    def _chunk(self) -> int:
        chosen = self._config.log_probs_chunk_size
        return chosen if chosen > 0 else default_chunk(self._model.head.weight.shape[0])

    def _batch_loss(self, rows: Sequence[StepRow], batch: PackedBatch, sums: StepSums) -> torch.Tensor:
        log_probs, entropy = self._score(batch, temperature=self._temperature, chunk=self._chunk)
        tokens = StepTokens.of(rows, log_probs, entropy)
        losses, metrics = policy_losses(tokens.policy, self._loss)
        sums.add(tokens, metrics, computed=batch.input_ids.numel())
        return (losses * tokens.weight).sum()


def _call(function: Callable[..., Any], *values: Any, **named: Any) -> Any:
    return function(*values, **named)


def usable_cpus() -> int:
    """CPUs that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def policy_loss(algorithm: AlgorithmConfig) -> PolicyLoss:
    """The loss that the flags declare."""
    if algorithm.loss_type == "sft_loss":
        # With the ratio 1 and the advantage 1, CISPO's -r A log pi is the negative log-likelihood.
        return PolicyLoss(surrogate="cispo", entropy_coef=algorithm.entropy_coef)
    estimator = algorithm.advantage_estimator
    high = algorithm.eps_clip if algorithm.eps_clip_high is None else algorithm.eps_clip_high
    rule = correction_rule(algorithm)
    return PolicyLoss(
        clip_low=algorithm.eps_clip,
        clip_high=high,
        dual_clip=algorithm.eps_clip_c,
        entropy_coef=algorithm.entropy_coef,
        kl_type=kl_type(algorithm.kl_loss_type) if algorithm.use_kl_loss else None,
        kl_coef=algorithm.kl_loss_coef,
        unbiased_kl=algorithm.use_unbiased_kl,
        correction=rule if rule is not None and rule.is_local else None,
        surrogate=cast(Surrogate, estimator) if estimator in get_args(Surrogate) else "ppo",
        opsm_delta=algorithm.opsm_delta if algorithm.use_opsm else None,
    )


def _saved_buffers(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """What belongs to a model folder and is no parameter, e.g. the correction bias of a router."""
    saved = module.state_dict().keys()
    return {name: buffer for name, buffer in module.named_buffers() if name in saved}


def _form(tensor: torch.Tensor | None) -> str:
    return "nothing" if tensor is None else f"{tuple(tensor.shape)} {tensor.dtype} on {tensor.device}"

"""AdamW with a learning-rate schedule and gradient clipping.

Invariant: weights change in place, because the engine may read the same storage; a step with gradients that
are not finite changes nothing. Knows parameters by name; knows no model and no loss.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from slime.backends.torch.sharding import own, spread_like, whole
from slime.config.training_sections import TrainConfig
from slime.errors import ConfigError, NonFiniteGradientError

MAX_SKIPPED_STEPS = 3


@dataclass(frozen=True, slots=True)
class Schedule:
    """Learning rate of each step: linear warm-up, then constant or cosine decay.

    Attributes:
        warmup: steps of warm-up; step n of them (from 0) has the rate peak * (n + 1) / warmup.
        decay_steps: step from which the cosine stays at `floor`.
    """

    peak: float
    floor: float
    style: str
    warmup: int
    decay_steps: int

    def rate(self, step: int) -> float:
        """Learning rate of the step with this index, from 0."""
        if step < self.warmup:
            return self.peak * (step + 1) / self.warmup
        if self.style == "constant":
            return self.peak
        share = min(1.0, (step - self.warmup) / max(1, self.decay_steps - self.warmup))
        return self.floor + (self.peak - self.floor) * 0.5 * (1 + math.cos(math.pi * share))


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What an optimizer step did: gradient norm before clipping, rate, and whether it was skipped."""

    grad_norm: float
    rate: float
    skipped: bool


class Optimizer:
    """AdamW (arXiv:1711.05101) over named parameters; weight decay spares vectors (norms and biases)."""

    def __init__(
        self, parameters: Mapping[str, torch.nn.Parameter], config: TrainConfig, total_steps: int
    ) -> None:
        self._parameters = dict(parameters)
        self._clip = config.clip_grad
        self.steps = 0
        self.skipped_in_a_row = 0
        self.schedule = Schedule(
            peak=config.lr,
            floor=config.min_lr,
            style=config.lr_decay_style,
            warmup=config.lr_warmup_iters,
            decay_steps=config.lr_decay_iters or total_steps,
        )
        self._offloads = config.optimizer_cpu_offload
        self._stepped = (
            {n: _host_copy(p) for n, p in parameters.items()} if self._offloads else self._parameters
        )
        matrices = [p for p in self._stepped.values() if p.dim() > 1]
        vectors = [p for p in self._stepped.values() if p.dim() <= 1]
        groups = [
            {"params": matrices, "weight_decay": config.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        self._adamw = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=config.lr,
            betas=(config.adam_beta1, config.adam_beta2),
            eps=config.adam_eps,
            fused=True,
        )

    def zero_grad(self) -> None:
        """Drop all gradients and their memory."""
        for parameter in (*self._parameters.values(), *self._stepped.values()):
            parameter.grad = None

    def step(self) -> StepOutcome:
        """Clip by global norm and step; a parameter without gradient counts as gradient zero.

        Raises:
            NonFiniteGradientError: gradients were not finite for `MAX_SKIPPED_STEPS` steps in a row.
        """
        rate = self.schedule.rate(self.steps)
        gradients = self._gradients()
        norm = whole(torch.nn.utils.get_total_norm(gradients)).item()
        if not math.isfinite(norm):
            self._skip(norm)
            return StepOutcome(norm, rate, skipped=True)
        if self._clip and norm > self._clip:
            torch._foreach_mul_(gradients, self._clip / (norm + 1e-6))
        for group in self._adamw.param_groups:
            group["lr"] = rate
        if self._offloads:
            self._step_on_the_host()
        else:
            self._adamw.step()
        self.steps += 1
        self.skipped_in_a_row = 0
        return StepOutcome(norm, rate, skipped=False)

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """Moments by ``exp_avg.<name>`` and ``exp_avg_sq.<name>``; empty before the first step."""
        state = self._adamw.state
        return {
            f"{key}.{name}": state[parameter][key]
            for name, parameter in self._stepped.items()
            if parameter in state
            for key in ("exp_avg", "exp_avg_sq")
        }

    @property
    def moment_steps(self) -> int:
        """Steps that the moments have seen; fewer than `steps` after a fresh start of the optimizer."""
        return max((int(state["step"]) for state in self._adamw.state.values()), default=0)

    def load_state(self, tensors: Mapping[str, torch.Tensor], *, steps: int, moment_steps: int) -> None:
        """Inverse of `state_tensors`, with the position in the schedule and the steps of the moments.

        Args:
            tensors: of spread parameters, the rows of this rank.

        Raises:
            KeyError, ValueError: a tensor is missing or has another shape.
        """
        self._adamw.state.clear()
        self.steps = steps
        self.skipped_in_a_row = 0
        if not tensors:
            return
        for name, parameter in self._stepped.items():
            state: dict[str, torch.Tensor] = {
                "step": torch.tensor(float(moment_steps), device=parameter.device)
            }
            for key in ("exp_avg", "exp_avg_sq"):
                value = tensors[f"{key}.{name}"]
                if value.shape != own(parameter).shape:
                    raise ValueError(f"{key}.{name} has shape {tuple(value.shape)}")
                state[key] = spread_like(parameter, value.to(parameter.device, parameter.dtype, copy=True))
            self._adamw.state[parameter] = state

    def _step_on_the_host(self) -> None:
        """Weights and gradients to the copies, the step there, and the weights back into their storage."""
        pairs = [(p, self._stepped[name]) for name, p in self._parameters.items()]
        with torch.no_grad():
            for parameter, copy in pairs:
                assert parameter.grad is not None
                copy.copy_(parameter)
                copy.grad = parameter.grad.to(copy.device)
            self._adamw.step()
            for parameter, copy in pairs:
                parameter.copy_(copy)

    def _gradients(self) -> list[torch.Tensor]:
        gradients = []
        for parameter in self._parameters.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradients.append(parameter.grad)
        return gradients

    def _skip(self, norm: float) -> None:
        self.skipped_in_a_row += 1
        if self.skipped_in_a_row < MAX_SKIPPED_STEPS:
            return
        raise NonFiniteGradientError(
            f"the gradient norm was {norm} for {self.skipped_in_a_row} steps in a row",
            place=f"optimizer step {self.steps}",
            remedy="lower --lr, check the rewards for huge values, or train with --train-precision float32",
        )


def check_offload(config: TrainConfig, device: torch.device, ranks: int) -> None:
    """Refuse ``--optimizer-cpu-offload`` where it cannot work.

    Raises:
        ConfigError: the parameters are on the CPU already, or spread over ranks.
    """
    if not config.optimizer_cpu_offload or (device.type != "cpu" and ranks == 1):
        return
    reason = "the parameters are on the CPU already" if ranks == 1 else "parameters are spread over ranks"
    raise ConfigError(f"has no use here: {reason}", place="--optimizer-cpu-offload", remedy="leave it out")


def _host_copy(parameter: torch.nn.Parameter) -> torch.nn.Parameter:
    return torch.nn.Parameter(parameter.detach().to("cpu", copy=True))

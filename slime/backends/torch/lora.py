"""Low-rank adapters (LoRA, arXiv:2106.09685) on the linear layers of a model, through peft.

Invariant: the base weights are never written. What engines get is base + scale * B A, computed afresh from
them each time, so nothing drifts; with the adapters off, the model is the base to the bit.
Knows a module and its adapters; knows no optimizer, no loss and no engine.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from slime.backends.torch.sharding import whole
from slime.config.training_sections import TrainConfig
from slime.errors import CheckpointError, ConfigError

_ADAPTER = "default"
_SAMPLED = 4096
"""Elements of each base weight that its fingerprint looks at."""


class LoraAdapters:
    """The adapters of one Hugging Face module, which keeps its class and its interface."""

    def __init__(self, module: Any, config: TrainConfig) -> None:
        """Attach fresh adapters, whose B is zero: the model computes what it did. All else is frozen.

        Raises:
            ConfigError: peft is not installed, or targets that are not there or cannot have an adapter.
        """
        self._module = module
        self._model = _attach(module, config)
        self._layers = _layers(module)
        for layer in self._layers.values():
            layer.forward = functools.partial(_forward, layer)
        self._config = config

    def base_weights(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Parameters that are a weight of the merged model as they are, by Hugging Face name."""
        for name, parameter in self._frozen():
            if name.removesuffix(".base_layer.weight") not in self._layers:
                yield _plain(name), parameter

    def merged(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Weights of the merged model by Hugging Face name, tied ones once.

        Those without an adapter are views; the others are made when they are asked for, one at a time.
        """
        for name, parameter in self._frozen():
            layer = self._layers.get(name.removesuffix(".base_layer.weight"))
            yield _plain(name), whole(parameter.detach()) if layer is None else _merge(layer)

    def off(self) -> AbstractContextManager[None]:
        """Within it the model is the base."""
        context: AbstractContextManager[None] = self._model.disable_adapter()
        return context

    def adapters(self) -> dict[str, torch.Tensor]:
        """The adapters by peft's names; a call of all ranks together."""
        return {
            name: whole(parameter.detach())
            for name, parameter in self._model.named_parameters()
            if parameter.requires_grad
        }

    def save_peft(self, folder: Path, adapters: Mapping[str, torch.Tensor]) -> None:
        """Write a folder that `peft.PeftModel.from_pretrained` loads on top of the base."""
        self._model.save_pretrained(str(folder), state_dict=dict(adapters), save_embedding_layers=False)

    def settings(self) -> dict[str, Any]:
        """What a checkpoint must agree on: rank, alpha, layers and the base's fingerprint."""
        return {
            "rank": self._config.lora_rank,
            "alpha": self._config.lora_alpha,
            "layers": [*self._layers],
            "base": _fingerprint(self._frozen()),
        }

    def _frozen(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        adapters = {id(p) for layer in self._layers.values() for p in (_a(layer), _b(layer))}
        for name, parameter in self._module.named_parameters():
            if id(parameter) not in adapters:
                yield name, parameter


def check_settings(ours: Mapping[str, Any] | None, saved: Mapping[str, Any] | None, folder: Path) -> None:
    """Compare the `settings` of a run and of a checkpoint; None is one without adapters.

    Raises:
        CheckpointError: naming the first setting that differs.
    """
    if ours is None or saved is None:
        if ours is not saved:
            has, lacks = ("the run", "it") if saved is None else ("it", "the run")
            raise CheckpointError(
                f"{has} has LoRA adapters and {lacks} has none",
                place=str(folder),
                remedy="resume with the --lora-rank of the run that saved it",
            )
        return
    remedies = {"base": "give the --hf-checkpoint of the run that saved it"}
    for name in ("rank", "alpha", "layers", "base"):
        if ours[name] != saved[name]:
            raise CheckpointError(
                f"its adapters have {name} {_short(saved[name])}, the run's {_short(ours[name])}",
                place=str(folder),
                remedy=remedies.get(name, "resume with the --lora flags of the run that saved it"),
            )


def _attach(module: Any, config: TrainConfig) -> Any:
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise ConfigError(
            f"needs the package peft: {error}", place="--lora-rank", remedy="pip install 'slime[lora]'"
        ) from error
    targets = config.lora_target_modules
    try:
        found = get_peft_model(
            module,
            LoraConfig(
                r=config.lora_rank,
                lora_alpha=config.lora_alpha,
                lora_dropout=0.0,
                target_modules=_linear_layers(module) if targets == ["all-linear"] else targets,
                task_type="CAUSAL_LM",
            ),
        )
    except ValueError as error:
        raise ConfigError(str(error).splitlines()[0], place="--lora-target-modules") from error
    found.eval()
    return found


def _linear_layers(module: Any) -> list[str]:
    """All but the output layer. (peft's own all-linear also takes fused experts.)"""
    output = module.get_output_embeddings()
    return [
        name
        for name, layer in module.named_modules()
        if isinstance(layer, torch.nn.Linear) and layer is not output
    ]


def _layers(module: Any) -> dict[str, Any]:
    """Layers with an adapter, by name."""
    from peft.tuners.lora import LoraLayer

    found = {name: layer for name, layer in module.named_modules() if isinstance(layer, LoraLayer)}
    output = module.get_output_embeddings()
    for name, layer in found.items():
        if layer is output or not isinstance(layer.get_base_layer(), torch.nn.Linear):
            raise ConfigError(
                f"{name} cannot have an adapter: it is the output layer, or not a linear layer",
                place="--lora-target-modules",
                remedy="name linear layers inside the decoder, e.g. q_proj k_proj v_proj o_proj",
            )
    return found


def _forward(layer: Any, inputs: torch.Tensor) -> torch.Tensor:
    """What peft's layer computes, [..., out], in place: its own makes three more such tensors."""
    output: torch.Tensor = layer.base_layer(inputs)
    if layer.disable_adapters:
        return output
    narrow = layer.lora_A[_ADAPTER](inputs).to(output.dtype)
    wide = _b(layer).to(output.dtype)
    output.view(-1, wide.shape[0]).addmm_(
        narrow.view(-1, wide.shape[1]), wide.t(), alpha=layer.scaling[_ADAPTER]
    )
    return output


def _merge(layer: Any) -> torch.Tensor:
    """base + scale * B A in one product: [out, in], float32, rounded once per sum."""
    with torch.no_grad():
        base = layer.get_base_layer().weight
        return torch.addmm(whole(base), whole(_b(layer)), whole(_a(layer)), alpha=layer.scaling[_ADAPTER])


def _a(layer: Any) -> torch.nn.Parameter:
    weight: torch.nn.Parameter = layer.lora_A[_ADAPTER].weight
    return weight


def _b(layer: Any) -> torch.nn.Parameter:
    weight: torch.nn.Parameter = layer.lora_B[_ADAPTER].weight
    return weight


def _plain(name: str) -> str:
    return name.replace(".base_layer.", ".")


def _fingerprint(weights: Iterator[tuple[str, torch.nn.Parameter]]) -> str:
    """A digest of names, shapes and evenly spaced elements."""
    digest = hashlib.sha256()
    for name, weight in weights:
        flat = weight.detach().flatten()
        sampled = flat[:: max(1, len(flat) // _SAMPLED)].cpu().contiguous()
        digest.update(f"{_plain(name)} {tuple(weight.shape)}".encode())
        digest.update(sampled.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def _short(value: Any) -> str:
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"of {len(value)} layers ({', '.join(map(str, value[:3]))}, ...)"
    return str(value)

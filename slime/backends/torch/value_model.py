"""The critic's model: the body of a causal model with one number a token instead of logits.

Invariant: what it computes packed is what it computes row by row: that is checked at load. A value head that
the folder does not hold starts at zero, so the first values are 0 and draw nothing from the random state.
Knows no optimizer and no loss.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoModel
from transformers.utils import logging

from slime.backends.torch import attention
from slime.backends.torch.forest import PackedBatch, Request, pack_requests
from slime.backends.torch.model import (
    CHECK_TOLERANCE,
    checked_folder,
    compute_dtype,
    find_device,
    predicting_states,
    pretrained,
    probe_rows,
)
from slime.errors import ModelError

HEAD = "score"


class ValueModule(torch.nn.Module):
    """A Hugging Face body and its value head, with the parameter names of a token classifier."""

    def __init__(self, body: Any, head: torch.nn.Linear) -> None:
        super().__init__()
        self.add_module(body.base_model_prefix, body)
        self.add_module(HEAD, head)
        self._no_split_modules = body._no_split_modules


@dataclass(frozen=True, slots=True)
class ValueModel:
    """A body, its value head, both as one module, and the dtype of their products."""

    module: ValueModule
    body: Any
    head: torch.nn.Linear
    compute_dtype: torch.dtype
    device: torch.device

    def values(self, batch: PackedBatch) -> torch.Tensor:
        """[T] value of the state before each requested target: of all that the policy saw when it chose."""
        states = predicting_states(self.body, batch, self.compute_dtype)
        values: torch.Tensor = self.head(states)[:, 0]
        return values.index_select(0, batch.query_position[batch.token_query])

    def save_pretrained(self, folder: Path, weights: Mapping[str, torch.Tensor]) -> None:
        """Write config and weights as a token classifier with one label, which `load_value_model` reads."""
        config = copy.deepcopy(self.body.config)
        config.num_labels = 1
        config.architectures = [type(self.body).__name__.removesuffix("Model") + "ForTokenClassification"]
        config.save_pretrained(folder)
        tensors = {name: weight.contiguous() for name, weight in weights.items()}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def load_value_model(
    folder: str | Path, *, precision: str = "float32", device: str | None = None
) -> ValueModel:
    """Load the body of a causal model or classifier in float32, with the folder's value head if it has one.

    Args:
        precision, device: as in `load_model`.

    Raises:
        ConfigError: no such device here.
        ModelError: no such folder, weights missing, a head of another width, or an architecture that cannot
            be trained packed.
    """
    path = checked_folder(folder)
    attention.register()
    place = find_device(device)
    with _without_load_report():
        body = pretrained(AutoModel, path)
    body.eval()
    head = _head(path, body.config)
    module = ValueModule(body, head).to(place).requires_grad_(True)
    model = ValueModel(module, body, head, compute_dtype(precision, place), place)
    _check_packing(model, path)
    return model


@contextmanager
def _without_load_report() -> Iterator[None]:
    """Keep transformers from warning of the output layer, which a critic leaves in the folder."""
    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)


def _head(path: Path, config: Any) -> torch.nn.Linear:
    head = torch.nn.Linear(config.get_text_config().hidden_size, 1)
    saved = dict(_saved_head(path))
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            value = saved.get(name, torch.zeros_like(parameter))
            if value.shape != parameter.shape:
                raise ModelError(
                    f"its {HEAD}.{name} is {tuple(value.shape)}, a critic's is {tuple(parameter.shape)}",
                    place=str(path),
                    remedy="name a critic, a reward model with one label, or a causal model",
                )
            parameter.copy_(value)
    return head


def _saved_head(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for key in tensors.keys():  # noqa: SIM118
                if key.startswith(f"{HEAD}."):
                    yield key.removeprefix(f"{HEAD}."), tensors.get_tensor(key)


def _check_packing(model: ValueModel, path: Path) -> None:
    """Compare states of packed rows, two of them with a common prefix, with plain forwards of each.

    Raises:
        ModelError: they differ, so the architecture does something that packing breaks.
    """
    rows = probe_rows(model.body.config.get_text_config().vocab_size)
    with torch.no_grad():
        batch = pack_requests([Request(row, tuple(range(1, len(row)))) for row in rows], device=model.device)
        states = predicting_states(model.body, batch, torch.float32)
        packed = states[batch.query_position[batch.token_query]]
        model.body.set_attn_implementation("sdpa")
        plain = torch.cat([_plain_states(model, row) for row in rows])
        model.body.set_attn_implementation(attention.NAME)
    gap = ((packed - plain).abs().max() / plain.abs().max()).item()
    if not gap <= CHECK_TOLERANCE:
        raise ModelError(
            f"{type(model.body).__name__} gives other states packed than row by row (up to {gap:.2g} of the "
            "largest); the torch trainer does not support the architecture",
            place=str(path),
        )


def _plain_states(model: ValueModel, row: tuple[int, ...]) -> torch.Tensor:
    ids = torch.tensor([row], device=model.device)
    states: torch.Tensor = model.body(input_ids=ids, use_cache=False).last_hidden_state[0, :-1]
    return states.float()

"""Weights under the names of their checkpoint: transformers holds all experts of a layer in one parameter.

Invariant: the names, shapes and values are those that `save_pretrained` writes. Knows models by their config
only: none is loaded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from slime.errors import ModelError
from slime.serving.weights.outgoing import Transform
from slime.utils.routes import shape_of_folder


def checkpoint_names(folder: Path) -> Transform | None:
    """What makes of one of the trainer's weights those of the checkpoint; None where they are the same.

    Raises:
        ModelError: transformers does not know the model of the folder.
    """
    if shape_of_folder(str(folder)) is None:
        return None
    model = _empty_model(folder)

    def transform(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        from transformers.core_model_loading import revert_weight_conversion

        yield from revert_weight_conversion(model, {name: tensor.detach()}).items()

    return transform


def chained(first: Transform | None, second: Transform) -> Transform:
    """`second` of everything that `first` gives."""
    if first is None:
        return second

    def transform(name: str, tensor: torch.Tensor) -> Iterable[tuple[str, torch.Tensor]]:
        return (sent for part in first(name, tensor) for sent in second(*part))

    return transform


def _empty_model(folder: Path) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(folder)
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ModelError(f"transformers does not know the model: {error}", place=str(folder)) from error

"""Gradient checkpointing: a decoder layer keeps its input only, and computes the rest again in the backward.

Invariant: gradients are those without it, to the bit: nothing in a layer draws random numbers.
(Training deep nets with sublinear memory cost, arXiv:1604.06174.) Knows layers; knows no model.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from slime.errors import ConfigError


def recompute_layers(module: torch.nn.Module) -> None:
    """Checkpoint every decoder layer of a Hugging Face model whose modules are in evaluation mode.

    The library's own switch works in training mode only, which would turn dropout on.

    Raises:
        ConfigError: the architecture does not mark its layers.
    """
    layers = [layer for layer in module.modules() if isinstance(layer, GradientCheckpointingLayer)]
    if not layers:
        raise ConfigError(
            f"{type(module).__name__} does not mark the layers that can be computed again",
            place="--gradient-checkpointing",
            remedy="leave it out, and lower --max-tokens-per-gpu instead",
        )
    for layer in layers:
        layer.forward = functools.partial(_forward, layer.forward)


def _forward(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

"""Attention over a packed forest, as a function that every Hugging Face model can call by name.

Invariant: a token attends to its ancestors and to the tokens before it in its own segment, nothing else; the
result equals that of separate rows. Knows no model and no packing policy: the plan comes with the call.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from slime.backends.torch.forest import AttentionPlan
from slime.errors import ModelError

NAME = "slime_forest"


def register() -> None:
    """Make the function known to transformers as `NAME`, for which the library builds no mask."""
    AttentionInterface.register(NAME, forest_attention)


def forest_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *,
    forest: AttentionPlan | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of one packed row.

    Args:
        query: [1, heads, N, D]; `key` and `value`: [1, key-value heads, N, D].
        forest: the plan, passed to the model's forward as ``forest=``.

    Returns:
        [1, N, heads, D], and no attention weights.

    Raises:
        ModelError: the model does not pass the plan on, or uses a form of attention that is not supported.
    """
    if forest is None or attention_mask is not None or softcap is not None or s_aux is not None:
        _refuse(module, forest, softcap, s_aux)
    assert forest is not None
    grouped = key.shape[1] != query.shape[1]
    queries, keys, values = (torch.split(x, forest.sizes, 2) for x in (query, key, value))
    outputs = []
    for index, block in enumerate(forest.blocks):
        seen = (*block.before, index)
        mask = forest.mask(index, sliding_window, query.dtype)
        outputs.append(
            scaled_dot_product_attention(
                queries[index],
                torch.cat([keys[i] for i in seen], 2) if block.before else keys[index],
                torch.cat([values[i] for i in seen], 2) if block.before else values[index],
                attn_mask=mask,
                is_causal=mask is None,
                scale=scaling,
                enable_gqa=grouped,
            )
        )
    return torch.cat(outputs, 2).transpose(1, 2), None


def _refuse(
    module: torch.nn.Module, forest: AttentionPlan | None, softcap: float | None, s_aux: torch.Tensor | None
) -> None:
    if softcap is not None:
        reason = "uses soft-capped attention scores"
    elif s_aux is not None:
        reason = "uses attention sinks"
    elif forest is None:
        reason = "does not pass keyword arguments on to its attention"
    else:
        reason = "builds an attention mask of its own"
    raise ModelError(f"{type(module).__name__} {reason}; the torch trainer cannot pack such a model")

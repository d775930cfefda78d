"""Attention over one packed row: decode tokens of many sequences beside prefill chunks of others.

Transformers models call `packed_attention` (registered under `ATTENTION`) in every layer; what the row holds
comes from the context variable that `attending` sets, so that no model code is touched. Invariant: no Python
work per decode row. Knows nothing of scheduling or of where cache slots come from.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from slime.errors import ModelError
from slime.serving.embedded.kv_cache import Arena

ATTENTION = "slime_packed"
"""Name of the attention implementation in transformers."""


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """What a layer asks of its attention: factor on the scores, window length, soft cap (Gemma 2)."""

    scale: float
    window: int | None
    softcap: float | None


class PackedBatch(Protocol):
    """What fills the packed row. Queries are [N, heads, dim], keys and values [N, kv_heads, dim]."""

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> Tensor:
        """Store keys and values, return the attention output [N, heads, dim]."""
        ...


_BATCH: ContextVar[PackedBatch] = ContextVar("slime_packed_batch")


@contextlib.contextmanager
def attending(batch: PackedBatch) -> Iterator[None]:
    """Let the model's attention work on `batch` inside the block."""
    token = _BATCH.set(batch)
    try:
        yield
    finally:
        _BATCH.reset(token)


def packed_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention function in the form of transformers: [1, heads, N, dim] in, [1, N, heads, dim] out.

    Raises:
        ModelError: the layer has attention sinks (`s_aux`), which no part here knows.
    """
    if s_aux is not None:
        raise ModelError("it has attention sinks")
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    options = AttentionOptions(scale, sliding_window, softcap)
    queries, keys, values = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    return _BATCH.get().attend(module.layer_idx, queries, keys, values, options)[None], None


@dataclass(slots=True)
class DecodeGroup:
    """The next token of every sequence of one arena: row i of the group is slot i.

    Attributes:
        positions: [B] position of each new token; the cache is valid below it.
        width: number of cache positions to read, the largest position + 1.
    """

    arena: Arena
    positions: Tensor
    width: int
    write_index: Tensor = field(init=False)
    _masks: dict[int | None, Tensor | None] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.write_index = self.arena.row_index(self.positions)

    @property
    def rows(self) -> int:
        """Tokens of the group in the packed row."""
        return self.positions.shape[0]

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> Tensor:
        """Two batched products over views; scores are [B * kv_heads, heads / kv_heads, width]."""
        count, heads, dim = query.shape
        kv_heads = key.shape[1]
        self.arena.write_rows(layer, self.write_index, key.reshape(-1, dim), value.reshape(-1, dim))
        keys, values = self.arena.view(layer, count, self.width)
        queries = query.reshape(count * kv_heads, heads // kv_heads, dim)
        scores = torch.bmm(queries * options.scale, keys.transpose(1, 2))
        if options.softcap is not None:
            scores = (scores / options.softcap).tanh_().mul_(options.softcap)
        mask = self._mask(options.window)
        if mask is not None:
            scores.view(count, heads, self.width).add_(mask)
        weights = scores.softmax(-1, dtype=torch.float32).to(values.dtype)
        return torch.bmm(weights, values).view(count, heads, dim)

    def _mask(self, window: int | None) -> Tensor | None:
        if window is not None and self.width <= window:
            window = None
        if window not in self._masks:
            self._masks[window] = self._build_mask(window)
        return self._masks[window]

    def _build_mask(self, window: int | None) -> Tensor | None:
        """Additive mask [B, 1, width], or None where every row sees the whole width."""
        last = self.positions[:, None]
        index = torch.arange(self.width)
        hidden = index > last
        if window is not None:
            hidden |= index <= last - window
        if not hidden.any():
            return None
        mask = torch.zeros(hidden.shape, dtype=self.arena.dtype).masked_fill_(hidden, float("-inf"))
        return mask[:, None]


@dataclass(slots=True)
class PrefillSpan:
    """The next `rows` prompt tokens of one sequence, at positions `start` and on.

    Attributes:
        buffer: [layers, 2, kv_heads, capacity, dim] keys and values of the sequence, valid below `start`.
    """

    buffer: Tensor
    start: int
    rows: int
    _masks: dict[int | None, Tensor | None] = field(init=False, default_factory=dict)

    @property
    def stop(self) -> int:
        """First position behind the span."""
        return self.start + self.rows

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> Tensor:
        """Causal attention of the new rows to the buffer up to themselves."""
        buffer = self.buffer[layer, :, :, : self.stop]
        buffer[0, :, self.start :] = key.transpose(0, 1)
        buffer[1, :, self.start :] = value.transpose(0, 1)
        groups = query.shape[1] // key.shape[1]
        keys, values = (repeat_heads(half, groups) for half in buffer)
        queries = query.transpose(0, 1)
        mask = self._mask(options.window)
        if options.softcap is not None:
            return _capped_attention(queries, keys, values, mask, self._causal(None), options)
        out = F.scaled_dot_product_attention(
            queries[None],
            keys[None],
            values[None],
            attn_mask=mask,
            is_causal=mask is None and self.rows > 1,
            scale=options.scale,
        )
        return out[0].transpose(0, 1)

    def _mask(self, window: int | None) -> Tensor | None:
        """Visible positions [rows, stop], or None where plain causality (or a single row) says it all."""
        if window is not None and self.stop <= window:
            window = None
        if window not in self._masks:
            plain = window is None and (self.start == 0 or self.rows == 1)
            self._masks[window] = None if plain else self._causal(window)
        return self._masks[window]

    def _causal(self, window: int | None) -> Tensor:
        rows = torch.arange(self.start, self.stop)[:, None]
        index = torch.arange(self.stop)
        visible = index <= rows
        return visible if window is None else visible & (index > rows - window)


def repeat_heads(tensor: Tensor, groups: int) -> Tensor:
    """[kv_heads, T, dim] -> [kv_heads * groups, T, dim], each head repeated for its query heads."""
    return tensor if groups == 1 else tensor.repeat_interleave(groups, dim=0)


def _capped_attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    causal: Tensor,
    options: AttentionOptions,
) -> Tensor:
    """Plain attention with a soft cap on the scores; [heads, rows, dim] in, [rows, heads, dim] out."""
    assert options.softcap is not None
    scores = (queries @ keys.transpose(1, 2)) * options.scale
    scores = (scores / options.softcap).tanh() * options.softcap
    scores.masked_fill_(~(causal if mask is None else mask), float("-inf"))
    weights = scores.softmax(-1, dtype=torch.float32).to(values.dtype)
    return (weights @ values).transpose(0, 1)


@dataclass(slots=True)
class ForwardBatch:
    """One packed row: the decode groups first, then the prefill spans."""

    parts: list[DecodeGroup | PrefillSpan]

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> Tensor:
        """Each part on its own rows."""
        if len(self.parts) == 1:
            return self.parts[0].attend(layer, query, key, value, options)
        outputs, start = [], 0
        for part in self.parts:
            rows = slice(start, start + part.rows)
            outputs.append(part.attend(layer, query[rows], key[rows], value[rows], options))
            start += part.rows
        return torch.cat(outputs)

"""From hidden states to log-probs and entropies, with logits held only chunk by chunk.

Invariant: no tensor of [positions, vocabulary] beyond one chunk exists, forward or backward. The last chunk
of a call is kept for its backward; the others are computed again. Sums are float32 whatever the matmul's
dtype.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import linear

# Elementwise passes go over a few rows of the chunk at a time, which stay in cache.
_PASS_ELEMENTS = 2**19


@dataclass(frozen=True, slots=True)
class Head:
    """The output layer: logits = softcap(scale * (hidden @ weight.T + bias)).

    Attributes:
        weight: [V, H]; `bias`: [V] or None.
        scale: factor of the architecture (Granite, Cohere), 1.0 for most.
        softcap: c of c * tanh(logits / c) (Gemma), or None.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None


@dataclass(frozen=True, slots=True)
class LogitOptions:
    """How logits are computed: divided by `temperature`, `chunk` positions at a time, matmul in `dtype`."""

    temperature: float
    chunk: int
    dtype: torch.dtype


def token_log_probs(
    hidden: torch.Tensor,
    head: Head,
    query_position: torch.Tensor,
    query_target: torch.Tensor,
    options: LogitOptions,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs of chosen targets, and entropies, under softmax(logits / temperature).

    Args:
        hidden: [P, H] states behind the final norm.
        query_position: [Q] ascending indices into P; each (position, target) pair at most once.
        query_target: [Q] token ids.

    Returns:
        log-probs [Q] and entropies in nats [P], float32, differentiable in `hidden`, weight and bias.
    """
    log_probs, entropy = _TokenLogProbs.apply(  # type: ignore[no-untyped-call]
        hidden, head.weight, head.bias, query_position, query_target, head, options
    )
    return log_probs, entropy


def plain_logits(hidden: torch.Tensor, head: Head, dtype: torch.dtype) -> torch.Tensor:
    """Logits [P, V] float32 of states [P, H], held whole, by ordinary autograd; matmul in `dtype`."""
    bias = None if head.bias is None else head.bias.to(dtype)
    logits = head.scale * linear(hidden.to(dtype), head.weight.to(dtype), bias).float()
    return logits if head.softcap is None else head.softcap * (logits / head.softcap).tanh()


class _TokenLogProbs(torch.autograd.Function):
    """Fused linear, log-softmax, gather and entropy."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        query_position: torch.Tensor,
        query_target: torch.Tensor,
        head: Head,
        options: LogitOptions,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        log_probs = hidden.new_empty(len(query_position), dtype=torch.float32)
        entropy, log_sum = (hidden.new_empty(len(hidden), dtype=torch.float32) for _ in range(2))
        kept = None
        for rows, queries in _chunks(len(hidden), query_position, options.chunk):
            kept = None
            kept = _logits(hidden[rows], head, options)
            log_sum[rows], entropy[rows] = _log_softmax_(kept)
            log_probs[queries] = kept[query_position[queries] - rows.start, query_target[queries]]
        if any(ctx.needs_input_grad):
            ctx.kept = kept
            ctx.save_for_backward(hidden, query_position, query_target, log_sum, entropy)
            ctx.head, ctx.options = head, options
        return log_probs, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad_log_probs, grad_entropy = gradients
        hidden, query_position, query_target, log_sum, entropy = ctx.saved_tensors
        head, options, kept = ctx.head, ctx.options, ctx.kept
        ctx.kept = None
        uses_entropy = bool(grad_entropy.any())
        sums = _Gradients(hidden, head, learns=ctx.needs_input_grad[1])
        for rows, queries in reversed(list(_chunks(len(hidden), query_position, options.chunk))):
            log_p = kept
            if log_p is None:
                log_p = _logits(hidden[rows], head, options)
                _log_softmax_(log_p)
            kept = None
            slope = _softcap_slope(log_p, log_sum[rows], head, options)
            local, target = query_position[queries] - rows.start, query_target[queries]
            per_row = log_p.new_zeros(len(log_p)).index_add_(0, local, grad_log_probs[queries])
            _logit_gradient_(log_p, per_row, entropy[rows], grad_entropy[rows] if uses_entropy else None)
            log_p[local, target] += grad_log_probs[queries]
            sums.add(rows, log_p if slope is None else log_p.mul_(slope), options)
        return sums.hidden, sums.weight, sums.bias, None, None, None, None


class _Gradients:
    """Gradients, summed over chunks in float32: of hidden states and, where it learns, of weight and bias."""

    def __init__(self, states: torch.Tensor, head: Head, *, learns: bool) -> None:
        self._states = states
        self._head = head
        self._learns = learns
        self.hidden = torch.empty_like(states)
        self.weight: torch.Tensor | None = None
        self.bias = torch.zeros_like(head.bias) if learns and head.bias is not None else None

    def add(self, rows: slice, grad_logits: torch.Tensor, options: LogitOptions) -> None:
        """Take the gradient [C, V] of a chunk's softmax arguments."""
        factor = self._head.scale / options.temperature
        grad = grad_logits.to(options.dtype)
        self.hidden[rows] = (grad @ self._head.weight.to(options.dtype)) * factor
        if not self._learns:
            return
        states = self._states[rows].to(options.dtype) * factor
        if self.weight is None:
            self.weight = (grad.t() @ states).to(self._head.weight.dtype)
        elif options.dtype == self.weight.dtype:
            self.weight.addmm_(grad.t(), states)
        else:
            self.weight += grad.t() @ states
        if self.bias is not None:
            self.bias += grad_logits.sum(0) * factor


def _chunks(positions: int, query_position: torch.Tensor, size: int) -> Iterator[tuple[slice, slice]]:
    """Slices of the positions, and of the queries that fall on them."""
    starts = list(range(0, positions, size))
    bounds = query_position.new_tensor([*starts, positions])
    cuts = torch.searchsorted(query_position, bounds).tolist()
    for index, start in enumerate(starts):
        yield slice(start, min(start + size, positions)), slice(cuts[index], cuts[index + 1])


def _logits(hidden: torch.Tensor, head: Head, options: LogitOptions) -> torch.Tensor:
    """Softmax arguments [C, V] of a chunk, float32."""
    factor = head.scale / (options.temperature if head.softcap is None else 1.0)
    bias = None if head.bias is None else head.bias.to(options.dtype) * factor
    states = hidden.to(options.dtype) * factor
    logits = linear(states, head.weight.to(options.dtype), bias).float()
    if head.softcap is not None:
        logits.div_(head.softcap).tanh_().mul_(head.softcap / options.temperature)
    return logits


def _log_softmax_(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Turn logits [C, V] into log-probs in place; returns log-sum-exp [C] and entropy [C]."""
    first = logits[:, 0].clone()
    entropy = logits.new_empty(len(logits))
    scratch = torch.empty_like(logits[next(_passes(logits))])
    for rows in _passes(logits):
        block = logits[rows]
        work = scratch[: len(block)]
        block.copy_(torch.log_softmax(block, -1, out=work))
        entropy[rows] = -torch.exp(block, out=work).mul_(block).sum(-1)
    return first - logits[:, 0], entropy


def _logit_gradient_(
    log_p: torch.Tensor, per_row: torch.Tensor, entropy: torch.Tensor, grad_entropy: torch.Tensor | None
) -> None:
    """Replace log-probs [C, V] by the softmax part of the gradient of their arguments.

    d log p_t / d z = onehot(t) - p (the onehot is the caller's), d H / d z = -p (log p + H).
    """
    for rows in _passes(log_p):
        block = log_p[rows]
        scale = -per_row[rows, None]
        if grad_entropy is not None:
            scale = scale - grad_entropy[rows, None] * (block + entropy[rows, None])
        block.exp_().mul_(scale)


def _softcap_slope(
    log_p: torch.Tensor, log_sum: torch.Tensor, head: Head, options: LogitOptions
) -> torch.Tensor | None:
    """d softcap(x) / d x [C, V], or None without a softcap."""
    if head.softcap is None:
        return None
    capped = (log_p + log_sum[:, None]) * (options.temperature / head.softcap)
    return 1 - capped.square_()


def _passes(values: torch.Tensor) -> Iterator[slice]:
    step = max(1, _PASS_ELEMENTS // values.shape[1])
    for start in range(0, len(values), step):
        yield slice(start, min(start + step, len(values)))

"""Next tokens of a whole batch, and their log-probs.

Sampling inverts the cumulative distribution with one uniform per row, hashed from (seed, position), so a
request's tokens do not depend on its neighbours. Log-probs are over the full vocabulary after penalties and
temperature and before top-k, top-p and min-p (greedy: temperature 1). Knows nothing of requests' life.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slime.serving.embedded.request import SamplingParams, TopLogprobs

BLOCKS = 64
"""The vocabulary is summed in so many blocks: double precision where it counts, float32 where it costs."""
NUCLEUS_WIDTH = 1024
"""Likeliest tokens that top-p looks at before it sorts the whole vocabulary."""

Uint64: TypeAlias = NDArray[np.uint64]


def uniforms(seeds: Uint64, positions: Uint64) -> NDArray[np.float64]:
    """Uniform numbers in [0, 1) by counter: splitmix64 (Steele et al. 2014) of seed and position."""
    with np.errstate(over="ignore"):
        bits = _mix(_mix(seeds) + positions * np.uint64(0x9E3779B97F4A7C15))
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(bits: Uint64) -> Uint64:
    bits = bits + np.uint64(0x9E3779B97F4A7C15)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


@dataclass(frozen=True, slots=True)
class Row:
    """What sampling needs of one request.

    Attributes:
        tokens: prompt and output, the live list.
        stop_ids: tokens that may not come before `params.min_new_tokens`.
    """

    params: SamplingParams
    seed: int
    prompt_length: int
    tokens: list[int]
    stop_ids: tuple[int, ...]
    top_logprobs: int

    @property
    def adjusts(self) -> bool:
        """Whether logits change before the temperature."""
        params = self.params
        return bool(
            params.logit_bias
            or params.frequency_penalty
            or params.presence_penalty
            or params.repetition_penalty != 1.0
            or len(self.tokens) - self.prompt_length < params.min_new_tokens
        )

    @property
    def filters(self) -> bool:
        """Whether only a part of the vocabulary may be sampled."""
        params = self.params
        narrowed = params.top_p < 1.0 or params.top_k > 0 or params.min_p > 0.0
        return narrowed and params.temperature > 0.0


@dataclass(frozen=True, slots=True)
class Sampled:
    """One entry a row."""

    tokens: list[int]
    logprobs: list[float]
    top_logprobs: list[TopLogprobs]


class Sampler:
    """Sampling settings of a fixed list of rows as tensors; rebuilt when the batch changes."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = list(rows)
        params = [row.params for row in self.rows]
        self._seeds = np.array([row.seed & (2**64 - 1) for row in self.rows], dtype=np.uint64)
        temperatures = [p.temperature or 1.0 for p in params]
        self._temperature = torch.tensor(temperatures)[:, None] if set(temperatures) != {1.0} else None
        greedy = torch.tensor([p.temperature == 0.0 for p in params])[:, None]
        self._greedy = greedy if greedy.any() else None
        self._all_greedy = bool(greedy.all())
        self._filtered = [i for i, row in enumerate(self.rows) if row.filters]
        self._filters = Filters.of([params[i] for i in self._filtered])
        self._wants_top = any(row.top_logprobs for row in self.rows)

    def sample(self, logits: Tensor) -> Sampled:
        """Sample one token a row from logits [rows, vocab] in float32, which are overwritten."""
        for index, row in enumerate(self.rows):
            if row.adjusts:
                _adjust(logits[index], row)
        if self._temperature is not None:
            logits.div_(self._temperature)
        peak = logits.amax(-1, keepdim=True)
        weights = (logits - peak).exp_()
        tokens, total = self._choose(logits, weights)
        shift = peak.double() + total.log()
        logprobs = logits.gather(1, tokens).double() - shift
        return Sampled(tokens[:, 0].tolist(), logprobs[:, 0].tolist(), self._top(logits, shift))

    def _choose(self, logits: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Chosen tokens [rows, 1] and the weights' sums [rows, 1] in float64."""
        if self._all_greedy:
            return logits.argmax(-1, keepdim=True), weights.sum(-1, keepdim=True).double()
        positions = np.array([len(row.tokens) for row in self.rows], dtype=np.uint64)
        uniform = torch.from_numpy(uniforms(self._seeds, positions))[:, None]
        tokens, total = inverse_cdf(weights, uniform)
        if self._filtered:
            rows = torch.tensor(self._filtered)
            tokens[rows] = sample_filtered(weights[rows], total[rows], uniform[rows], self._filters)
        if self._greedy is not None:
            tokens = torch.where(self._greedy, logits.argmax(-1, keepdim=True), tokens)
        return tokens, total

    def _top(self, logits: Tensor, shift: Tensor) -> list[TopLogprobs]:
        if not self._wants_top:
            return [[] for _ in self.rows]
        return [top_logprobs(logits[i], shift[i].item(), row.top_logprobs) for i, row in enumerate(self.rows)]


def inverse_cdf(weights: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Sample rows of weights [R, V] at `uniform` [R, 1]; returns tokens [R, 1] and the sums [R, 1]."""
    vocab = weights.shape[1]
    size = -(-vocab // BLOCKS)
    if size * BLOCKS != vocab:
        weights = torch.nn.functional.pad(weights, (0, size * BLOCKS - vocab))
    blocks = weights.view(-1, BLOCKS, size)
    cumulative = blocks.sum(-1).double().cumsum(-1)
    total = cumulative[:, -1:].clone()
    target = uniform * total
    block = torch.searchsorted(cumulative, target, right=True).clamp_(max=BLOCKS - 1)
    before = torch.where(block > 0, cumulative.gather(1, (block - 1).clamp(min=0)), 0.0)
    inner = blocks.gather(1, block[..., None].expand(-1, -1, size))[:, 0].double().cumsum(-1)
    # The block's sum is rounded otherwise than `inner`: stay below its end, behind which weights may be zero.
    target = torch.minimum(target - before, inner[:, -1:] * (1 - 2.0**-50))
    offset = torch.searchsorted(inner, target, right=True).clamp_(max=size - 1)
    return (block * size + offset).clamp_(max=vocab - 1), total


@dataclass(frozen=True, slots=True)
class Filters:
    """Top-k, top-p and min-p of the filtered rows, each [F, 1]."""

    top_k: Tensor
    top_p: Tensor
    min_p: Tensor

    @classmethod
    def of(cls, params: Sequence[SamplingParams]) -> Filters:
        """Settings that are off become bounds that never bind."""
        return cls(
            torch.tensor([p.top_k if p.top_k > 0 else 2**31 for p in params])[:, None],
            torch.tensor([p.top_p if p.top_p < 1.0 else 2.0 for p in params], dtype=torch.float64)[:, None],
            torch.tensor([p.min_p for p in params])[:, None],
        )

    def __getitem__(self, rows: Tensor) -> Filters:
        return Filters(self.top_k[rows], self.top_p[rows], self.min_p[rows])


def sample_filtered(
    weights: Tensor, total: Tensor, uniform: Tensor, filters: Filters, width: int = NUCLEUS_WIDTH
) -> Tensor:
    """Sample among the tokens that pass all three filters of the full distribution (Holtzman et al. 2020).

    A row whose kept set may reach beyond the `width` likeliest tokens is done again over all of them.
    """
    width = min(width, weights.shape[1])
    values, ids = weights.topk(width)
    mass = values.double().cumsum(-1)
    keep = mass - values < filters.top_p * total
    keep &= torch.arange(width) < filters.top_k
    keep &= values >= filters.min_p * values[:, :1]
    cumulative = torch.where(keep, values, 0.0).double().cumsum(-1)
    index = torch.searchsorted(cumulative, uniform * cumulative[:, -1:], right=True)
    index = torch.minimum(index, keep.sum(-1, keepdim=True) - 1)
    tokens = ids.gather(1, index)
    if width < weights.shape[1] and keep[:, -1].any():
        wide = keep[:, -1].nonzero()[:, 0]
        tokens[wide] = sample_filtered(
            weights[wide], total[wide], uniform[wide], filters[wide], weights.shape[1]
        )
    return tokens


def top_logprobs(logits: Tensor, shift: float, count: int) -> TopLogprobs:
    """The `count` likeliest tokens of one row; `shift` is the log of the sum of exponentials."""
    values, ids = logits.topk(min(count, logits.shape[0]))
    return list(zip((values.double() - shift).tolist(), ids.tolist(), strict=True))


def _adjust(logits: Tensor, row: Row) -> None:
    """Penalties (over the output; repetition over the prompt too), bias and forbidden stops, in place."""
    params, output = row.params, row.tokens[row.prompt_length :]
    if params.repetition_penalty != 1.0:
        seen = torch.tensor(sorted(set(row.tokens)))
        values = logits[seen]
        factor = params.repetition_penalty
        logits[seen] = torch.where(values > 0, values / factor, values * factor)
    if output and (params.frequency_penalty or params.presence_penalty):
        ids, counts = torch.unique(torch.tensor(output), return_counts=True)
        logits[ids] -= params.frequency_penalty * counts + params.presence_penalty
    for token, bias in (params.logit_bias or {}).items():
        logits[token] += bias
    if len(output) < params.min_new_tokens and row.stop_ids:
        logits[list(row.stop_ids)] = float("-inf")

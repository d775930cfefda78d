"""Discounted sums over time: returns, generalised advantage estimation, whitening.

Invariant: a sum never crosses the end of its sequence, and the chunked scan equals the plain loop.
Knows flat tensors and lengths; knows no rewards, rows or masks.
"""

from __future__ import annotations

import torch

WHITEN_EPSILON = 1e-8
CHUNK_SIZE = 128


def discounted_sums(
    values: torch.Tensor, lengths: torch.Tensor, factor: float, *, chunk_size: int = CHUNK_SIZE
) -> torch.Tensor:
    """y_t = x_t + factor * y_{t+1} inside each sequence.

    Every chunk is summed by one triangular matrix; the sums at the heads of the chunks obey the same
    recurrence with factor ** chunk_size, and are found by the same function.

    Args:
        values: [T] sequences after one another, floating point.
        lengths: [R] integers that sum to T.

    Returns:
        [T] in the dtype of `values`.

    Raises:
        ValueError: `chunk_size` below two.
    """
    if chunk_size < 2:
        raise ValueError(f"chunk_size must be at least 2, got {chunk_size}")
    chunks = -(-lengths // chunk_size)
    places = _chunk_places(lengths, chunks, chunk_size)
    padded = values.new_zeros(int(chunks.sum()) * chunk_size)
    padded[places] = values
    steps = torch.arange(chunk_size, device=values.device)
    exponents = (steps[:, None] - steps[None, :]).clamp_min(0)
    triangle = _powers(factor, exponents, values.dtype).tril()
    sums = padded.view(-1, chunk_size) @ triangle
    if bool((chunks > 1).any()):
        heads = discounted_sums(sums[:, 0].contiguous(), chunks, factor**chunk_size, chunk_size=chunk_size)
        following = torch.cat([heads[1:], heads.new_zeros(1)])
        following[chunks.cumsum(0)[chunks > 0] - 1] = 0
        sums = sums + following[:, None] * _powers(factor, chunk_size - steps, values.dtype)
    return sums.reshape(-1)[places]


def gae(
    rewards: torch.Tensor,
    values: torch.Tensor,
    lengths: torch.Tensor,
    *,
    gamma: float,
    lambd: float,
    chunk_size: int = CHUNK_SIZE,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Generalised advantage estimates and value targets.

    delta_t = r_t + gamma V_{t+1} - V_t, A_t = delta_t + gamma lambd A_{t+1}, returns = A + V; behind the end
    of a sequence V and A are 0. Source: arXiv:1506.02438, equation 16.

    Args:
        rewards, values: [T] sequences after one another.
        lengths: [R] integers that sum to T.

    Returns:
        advantages [T] and returns [T].
    """
    following = torch.cat([values[1:], values.new_zeros(min(1, len(values)))])
    following[lengths.cumsum(0)[lengths > 0] - 1] = 0
    delta = rewards + gamma * following - values
    advantages = discounted_sums(delta, lengths, gamma * lambd, chunk_size=chunk_size)
    return advantages, advantages + values


def vanilla_gae(
    rewards: torch.Tensor, values: torch.Tensor, *, gamma: float, lambd: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`gae` of rows of one length [B, L], token by token: the definition that the fast one equals."""
    following, running = torch.zeros_like(values[:, 0]), torch.zeros_like(values[:, 0])
    advantages = torch.empty_like(values)
    for t in reversed(range(values.shape[1])):
        running = rewards[:, t] + gamma * following - values[:, t] + gamma * lambd * running
        advantages[:, t] = running
        following = values[:, t]
    return advantages, advantages + values


def whiten(values: torch.Tensor) -> torch.Tensor:
    """(x - mean) / sqrt(variance + 1e-8) over all tokens [T], the variance with Bessel's correction.

    Every trained token weighs the same, so that no cut of a rollout changes it. Equal values give exactly 0:
    rounding must not be scaled up to a signal.
    """
    if not len(values) or bool((values == values[0]).all()):
        return torch.zeros_like(values)
    variance, mean = torch.var_mean(values, correction=1)
    return (values - mean) * torch.rsqrt(variance + WHITEN_EPSILON)


def _chunk_places(lengths: torch.Tensor, chunks: torch.Tensor, chunk_size: int) -> torch.Tensor:
    """[T] where each value stands when every sequence starts a chunk of its own."""
    padding = chunks * chunk_size - lengths
    before = padding.cumsum(0) - padding
    return torch.arange(int(lengths.sum()), device=lengths.device) + before.repeat_interleave(lengths)


def _powers(factor: float, exponents: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.pow(torch.tensor(factor, dtype=torch.float64), exponents).to(dtype)

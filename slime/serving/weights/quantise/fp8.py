"""Matrices in float8 e4m3 with a scale a block, and back.

Invariant: quantising what `dequantise` gave returns the same codes and scales, bit for bit (float32; with
scales that are powers of two in bfloat16 too). So weights that did not change do not change on their way to
an engine. Layout of scales: DeepSeek-V3 technical report (arXiv:2412.19437), section 3.3. Knows no names.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

LARGEST = 448.0
"""Greatest value of e4m3."""
_LAST_ROUNDED_DOWN = 464.0
"""Values up to half a step above it are nearest to it."""
_SPARE_BITS = 4
"""Low bits of a float32 scale that stay zero, so that every code times its scale is exact in float32."""


def block_of(shape: tuple[int, int], granularity: str, block: tuple[int, int] | None) -> tuple[int, int]:
    """Rows and columns that share a scale."""
    if block is not None:
        return block
    return (1, shape[1]) if granularity == "channel" else shape


def quantise(
    weight: Tensor, block: tuple[int, int], *, scale_dtype: torch.dtype, power_of_two: bool = False
) -> tuple[Tensor, Tensor]:
    """Codes [rows, columns] e4m3, and scales [ceil(rows / block rows), ceil(columns / block columns)].

    Args:
        weight: [rows, columns], finite; blocks at the edges may be smaller.
    """
    tiles = _tiles(weight.float(), block)
    largest = tiles.abs().amax((1, 3))
    scales = _powers_of_two(largest) if power_of_two else rounded_scales(largest / LARGEST, scale_dtype)
    codes = (tiles / scales[:, None, :, None]).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    rows, columns = weight.shape
    whole = codes.reshape(tiles.shape[0] * block[0], tiles.shape[2] * block[1])
    return whole[:rows, :columns].contiguous(), scales.to(scale_dtype)


def dequantise(codes: Tensor, scales: Tensor, block: tuple[int, int]) -> Tensor:
    """The weights [rows, columns] in float32."""
    rows, columns = codes.shape
    tiles = _tiles(codes.float(), block) * scales.float()[:, None, :, None]
    return tiles.reshape(tiles.shape[0] * block[0], tiles.shape[2] * block[1])[:rows, :columns].contiguous()


def scale_shape(shape: tuple[int, int], block: tuple[int, int]) -> tuple[int, int]:
    """Shape of the scales of a matrix."""
    return math.ceil(shape[0] / block[0]), math.ceil(shape[1] / block[1])


def rounded_scales(scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Scales as they can be stored, in float32: of so few bits that codes times scales are exact; not 0."""
    stored = scales.to(dtype).float()
    if dtype == torch.float32:
        half = 1 << (_SPARE_BITS - 1)
        stored = ((scales.view(torch.int32) + half) & -(1 << _SPARE_BITS)).view(torch.float32)
    return torch.where(scales > 0, stored.clamp_min(torch.finfo(dtype).tiny), 1.0)


def _powers_of_two(largest: Tensor) -> Tensor:
    """The least powers of two by which the largest weights divided are nearest to a code."""
    fraction, exponent = torch.frexp(largest / _LAST_ROUNDED_DOWN)
    exponent = exponent - (fraction == 0.5).to(exponent.dtype)
    return torch.where(largest > 0, torch.ldexp(torch.ones_like(largest), exponent.clamp_min(-126)), 1.0)


def _tiles(matrix: Tensor, block: tuple[int, int]) -> Tensor:
    """[row blocks, block rows, column blocks, block columns], filled up with zeros."""
    down, right = (-size % step for size, step in zip(matrix.shape, block, strict=True))
    filled = pad(matrix, (0, right, 0, down)) if down or right else matrix
    rows, columns = filled.shape
    return filled.view(rows // block[0], block[0], columns // block[1], block[1])

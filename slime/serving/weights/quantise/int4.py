"""Matrices in signed four-bit codes with a scale a group of columns, packed as compressed-tensors packs them.

Invariant: quantising what `dequantise` gave returns the same codes and scales, bit for bit; so does
quantising what any checkpoint with symmetric groups holds, up to the choice between equal values.
Eight codes lie in an int32, the first in its lowest bits, each with 8 added. Knows no names.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from slime.serving.weights.quantise.fp8 import rounded_scales

LEAST, LARGEST = -8, 7
_PER_WORD = 8
_BITS = 4


def quantise(weight: Tensor, group: int, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Packed codes [rows, ceil(columns / 8)] int32, and scales [rows, columns / group].

    A group takes the scale that lets its largest weight be 7 or -8, whichever is nearer to its weights.

    Args:
        weight: [rows, columns], finite; `group` divides the columns.
    """
    rows, columns = weight.shape
    groups = weight.float().view(rows, columns // group, group)
    codes, scales = _nearest(groups, scale_dtype)
    # Once more from the values, since two pairs of codes and scale may mean the same ones.
    codes, scales = _nearest(codes * scales, scale_dtype)
    return pack(codes.view(rows, columns)), scales[..., 0].to(scale_dtype)


def dequantise(packed: Tensor, scales: Tensor, columns: int) -> Tensor:
    """The weights [rows, columns] in float32."""
    codes = unpack(packed, columns).float().view(*scales.shape, columns // scales.shape[1])
    return (codes * scales.float()[..., None]).view(len(packed), columns)


def pack(codes: Tensor) -> Tensor:
    """Codes [rows, columns] in -8..7 as int32 words."""
    nibbles = pad((codes - LEAST).to(torch.int64), (0, -codes.shape[1] % _PER_WORD))
    words = nibbles.view(len(codes), math.ceil(codes.shape[1] / _PER_WORD), _PER_WORD)
    return (words << _shifts(codes)).sum(-1).to(torch.int32)


def unpack(packed: Tensor, columns: int) -> Tensor:
    """Inverse of `pack`, as int64."""
    nibbles = (packed[..., None].to(torch.int64) >> _shifts(packed)) & 0xF
    return nibbles.view(len(packed), -1)[:, :columns] + LEAST


def _nearest(groups: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes [rows, groups, group] as whole floats, and scales [rows, groups, 1] in float32."""
    largest = groups.abs().amax(-1, keepdim=True)
    codes, scales, error = _rounded(groups, largest, LARGEST, dtype)
    others, wider, other_error = _rounded(groups, largest, -LEAST, dtype)
    better = other_error < error
    return torch.where(better, others, codes), torch.where(better, wider, scales)


def _rounded(
    groups: Tensor, largest: Tensor, steps: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes and scales where the largest weight is `steps` steps, and their squared error, relative to it."""
    scales = rounded_scales(largest / steps, dtype)
    codes = (groups / scales).round().clamp(LEAST, LARGEST)
    return codes, scales, ((codes * scales - groups) / largest).square().sum(-1, keepdim=True)


def _shifts(like: Tensor) -> Tensor:
    return torch.arange(0, _PER_WORD * _BITS, _BITS, device=like.device)

"""Tensors of a checkpoint by what they belong to: a weight, and the parts that a quantised one is stored in.

Invariant: the stored parts of a weight are those that `quantise_weight` gives, and `dequantise_weight` takes
them all. Knows one weight at a time; knows no files and no configs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeAlias

import torch
from torch import Tensor

from slime.errors import ModelError
from slime.serving.weights.quantise import fp8, int4
from slime.serving.weights.quantise.scheme import Fp8, Int4, Scheme

Read: TypeAlias = Callable[[str], Tensor]
"""A stored tensor by its name."""
WEIGHT = ".weight"


def parts_of(name: str, scheme: Scheme) -> tuple[str, ...]:
    """Names of the stored tensors of the weight `name`, the codes first."""
    module = name.removesuffix(WEIGHT)
    if isinstance(scheme, Fp8):
        return name, f"{module}.{scheme.scale}"
    return tuple(f"{module}.{part}" for part in ("weight_packed", "weight_scale", "weight_shape"))


def quantise_weight(name: str, weight: Tensor, scheme: Scheme) -> Iterator[tuple[str, Tensor]]:
    """The stored tensors of a weight [rows, columns], by name.

    Raises:
        ModelError: a weight that is infinite or NaN, or that its groups do not divide; names it.
    """
    if not weight.is_meta and not bool(weight.isfinite().all()):
        raise ModelError("holds numbers that are not finite, which no quantised weight can", place=name)
    dtype: torch.dtype = getattr(torch, scheme.scale_dtype)
    shape = (weight.shape[0], weight.shape[1])
    if isinstance(scheme, Int4):
        packed, scales = int4.quantise(weight, _group(name, shape[1], scheme), dtype)
        sizes = torch.tensor(shape, device="meta" if weight.is_meta else "cpu")
        yield from zip(parts_of(name, scheme), (packed, scales, sizes), strict=True)
        return
    block = fp8.block_of(shape, scheme.granularity, scheme.block)
    codes, scales = fp8.quantise(weight, block, scale_dtype=dtype, power_of_two=scheme.power_of_two)
    scales = scales.view(1) if scheme.granularity == "tensor" else scales
    yield from zip(parts_of(name, scheme), (codes, scales), strict=True)


def dequantise_weight(name: str, scheme: Scheme, read: Read) -> Tensor:
    """The weight [rows, columns] in float32.

    Raises:
        ModelError: parts whose dtype or shapes do not fit the scheme.
    """
    if isinstance(scheme, Int4):
        packed, scales, sizes = (read(part) for part in parts_of(name, scheme))
        rows, columns = sizes.tolist()
        _check(name, scales, (rows, columns // _group(name, columns, scheme)))
        return int4.dequantise(packed, scales, columns)
    codes, scales = (read(part) for part in parts_of(name, scheme))
    if codes.dtype != torch.float8_e4m3fn or codes.ndim != 2:
        raise ModelError(
            f"is {codes.dtype} of shape {list(codes.shape)}, the config says FP8 (e4m3)", place=name
        )
    shape = (codes.shape[0], codes.shape[1])
    block = fp8.block_of(shape, scheme.granularity, scheme.block)
    scales = scales.view(1, 1) if scales.numel() == 1 else scales
    _check(name, scales, fp8.scale_shape(shape, block))
    return fp8.dequantise(codes, scales, block)


def _group(name: str, columns: int, scheme: Int4) -> int:
    size = scheme.group_size or columns
    if columns % size:
        raise ModelError(f"has {columns} columns, which groups of {size} do not divide", place=name)
    return size


def _check(name: str, scales: Tensor, expected: tuple[int, int]) -> None:
    if tuple(scales.shape) != expected:
        raise ModelError(
            f"has scales of shape {list(scales.shape)}, the config asks for {list(expected)}", place=name
        )

"""Weights as they leave the trainer: quantised where the engine is, in the dtype that it computes in,
bucketed.

Invariant: order is the trainer's; a bucket holds at most the given bytes, or one tensor that is larger; codes
of a quantised weight stay as they are. Knows nothing of engines' protocols or of where weights go.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch

from slime.errors import ModelError
from slime.serving.weights.layout import StoredTensor, torch_dtype

Transform: TypeAlias = Callable[[str, torch.Tensor], Iterable[tuple[str, torch.Tensor]]]
"""Makes of one weight what the engine's checkpoint has in its place, e.g. quantised values and scales."""
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_NAMES = {"float32": torch.float32, "float": torch.float32, "bfloat16": torch.bfloat16} | dict.fromkeys(
    ("float16", "half"), torch.float16
)


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A weight on its way.

    Attributes:
        tensor: as the trainer has it.
        dtype: as it is sent.
    """

    name: str
    tensor: torch.Tensor
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes that are sent."""
        return self.tensor.numel() * self.dtype.itemsize

    def converted(self) -> torch.Tensor:
        """In the dtype that is sent, dense."""
        return self.tensor.detach().to(self.dtype).contiguous()


class WireForm:
    """What the engines' checkpoint tells of names, shapes and dtypes.

    A checkpoint of one floating dtype is computed with in the engine's; one of several keeps its own dtypes.
    """

    def __init__(
        self,
        stored: Mapping[str, StoredTensor] | None,
        engine_dtype: str | None,
        transform: Transform | None = None,
    ) -> None:
        """
        Args:
            stored: the engines' checkpoint; None where they check names themselves.
            engine_dtype: SGLang's name of what engines compute in; None where the checkpoint decides.
            transform: what the checkpoint has in place of the trainer's weights.
        """
        self._stored = stored
        self._transform = transform
        uniform = len({entry.dtype for entry in (stored or {}).values()}) <= 1
        self._dtype = _NAMES.get(engine_dtype or "") if uniform else None

    def outgoing(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[Outgoing]:
        """What is sent for the trainer's weights.

        Raises:
            ModelError: a name that the engine's checkpoint lacks, or another shape. An engine that is given
                such weights may say nothing and compute with some of them.
        """
        for name, tensor in weights:
            for sent_name, sent in self._transform(name, tensor) if self._transform else ((name, tensor),):
                self._check(sent_name, sent)
                yield Outgoing(sent_name, sent, self._dtype_of(sent_name, sent))

    def sizes(self) -> list[int]:
        """Bytes of each tensor of the engines' checkpoint, as it would be sent."""
        return [self._size(entry) for entry in (self._stored or {}).values()]

    def _size(self, entry: StoredTensor) -> int:
        stored = torch_dtype(entry.dtype)
        if stored is None:
            return entry.end - entry.start
        return math.prod(entry.shape) * (self._dtype or stored).itemsize

    def _dtype_of(self, name: str, tensor: torch.Tensor) -> torch.dtype:
        if tensor.dtype not in _FLOATS:
            return tensor.dtype
        entry = (self._stored or {}).get(name)
        stored = torch_dtype(entry.dtype) if entry is not None else None
        return self._dtype or stored or tensor.dtype

    def _check(self, name: str, tensor: torch.Tensor) -> None:
        if self._stored is None:
            return
        entry = self._stored.get(name)
        if entry is None:
            raise ModelError(
                "the checkpoint that the engines serve has no such weight",
                place=name,
                remedy="train the model of --hf-checkpoint",
            )
        if entry.shape != tuple(tensor.shape):
            raise ModelError(
                f"has shape {list(tensor.shape)}, where the engines' checkpoint has {list(entry.shape)}",
                place=name,
                remedy="train the model of --hf-checkpoint",
            )


def buckets(items: Iterable[Outgoing], size: int) -> Iterator[tuple[list[Outgoing], bool]]:
    """Lists of at most `size` bytes (a larger tensor is alone in one), each with whether it is the last."""
    held: list[Outgoing] | None = None
    for bucket in _grouped(items, size):
        if held is not None:
            yield held, False
        held = bucket
    if held is not None:
        yield held, True


def _grouped(items: Iterable[Outgoing], size: int) -> Iterator[list[Outgoing]]:
    bucket: list[Outgoing] = []
    filled = 0
    for item in items:
        if bucket and filled + item.nbytes > size:
            yield bucket
            bucket, filled = [], 0
        bucket.append(item)
        filled += item.nbytes
    if bucket:
        yield bucket

"""`BucketBuffer`: memory that one bucket of weights lies in and other processes map; SGLang's message about
it.

Invariant: the memory has no name: others reach it through this process, and it is gone with it, however that
ends. It is reused for every bucket and only grows. The message is SGLang's ``flattened_bucket``, made without
SGLang; what it holds are torch's and Python's own types.
"""

from __future__ import annotations

import base64
import functools
import mmap
import os
from collections.abc import Callable, Sequence
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Any

import torch

from slime.serving.weights.outgoing import Outgoing

_ALIGNMENT = 64


class BucketBuffer:
    """Shared memory of this process (Linux)."""

    def __init__(self) -> None:
        self._file = os.memfd_create("slime-bucket", os.MFD_CLOEXEC)
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def fill(self, bucket: Sequence[Outgoing]) -> str:
        """Copy the weights in; the message that lets SGLang map them. Valid until the next call."""
        places = _places(bucket)
        size = places[-1][1] if places else 0
        self._grow(size)
        for item, (start, end) in zip(bucket, places, strict=True):
            target = self._bytes[start:end].view(item.dtype).view(item.tensor.shape)
            target.copy_(item.tensor.detach())
        path = f"/proc/{os.getpid()}/fd/{self._file}"
        return message(_Mapped(path, size), bucket, places)

    def close(self) -> None:
        """Give the memory up; a process that maps it keeps it."""
        self._bytes = torch.empty(0, dtype=torch.uint8)
        os.close(self._file)

    def _grow(self, size: int) -> None:
        if size > len(self._bytes):
            self._bytes = torch.empty(0, dtype=torch.uint8)
            os.ftruncate(self._file, size)
            self._bytes = torch.frombuffer(mmap.mmap(self._file, size), dtype=torch.uint8)


class _Mapped:
    """Pickles as a call that maps a file as bytes, privately: the reader cannot change what others read."""

    def __init__(self, path: str, size: int) -> None:
        self._path, self._size = path, size

    def __reduce__(self) -> tuple[Callable[[], torch.Tensor], tuple[()]]:
        call = functools.partial(torch.from_file, self._path, False, self._size, dtype=torch.uint8)
        return call, ()


def device_message(bucket: Sequence[Outgoing]) -> tuple[str, torch.Tensor]:
    """The message for weights on a GPU, through CUDA IPC, and the memory that it points to, to be held."""
    places = _places(bucket)
    flat = torch.empty(places[-1][1], dtype=torch.uint8, device=bucket[0].tensor.device)
    for item, (start, end) in zip(bucket, places, strict=True):
        flat[start:end].view(item.dtype).view(item.tensor.shape).copy_(item.tensor.detach())
    return message(flat, bucket, places), flat


def message(flat: Any, bucket: Sequence[Outgoing], places: Sequence[tuple[int, int]]) -> str:
    """SGLang's ``flattened_bucket`` (sglang.srt.weight_sync.tensor_bucket): bytes, and what lies where in
    them.
    """
    metadata = [
        SimpleNamespace(
            name=item.name,
            shape=item.tensor.shape,
            dtype=item.dtype,
            start_idx=start,
            end_idx=end,
            numel=end - start,
        )
        for item, (start, end) in zip(bucket, places, strict=True)
    ]
    data = ForkingPickler.dumps({"flattened_tensor": flat, "metadata": metadata})
    return base64.b64encode(data).decode()


def _places(bucket: Sequence[Outgoing]) -> list[tuple[int, int]]:
    places, start = [], 0
    for item in bucket:
        places.append((start, start + item.nbytes))
        start = -(-places[-1][1] // _ALIGNMENT) * _ALIGNMENT
    return places

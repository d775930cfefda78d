"""`BucketBuffer`: memory that one bucket of weights lies in and engines map; SGLang's message about it.

Invariant: the memory is reused for every bucket and only grows; it has a name only while an engine is to open
it, and a helper takes names away when this process ends, however it does. The message is SGLang's
``flattened_bucket``, made without SGLang, of calls that its unpickler allows.
"""

from __future__ import annotations

import base64
import errno
import mmap
import os
import secrets
import subprocess
from collections.abc import Callable, Sequence
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.multiprocessing.reductions import rebuild_storage_filename, rebuild_tensor, rebuild_typed_storage

from slime.errors import EngineError
from slime.serving.weights.outgoing import Outgoing

_SHM = Path("/dev/shm")
_ALIGNMENT = 64
_HEADER = 64
"""Bytes before the data in which torch counts references (aten/src/ATen/MapAllocator.cpp)."""
_REFERENCES = (1 << 30).to_bytes(4, "little")
"""More than ever go: the last one would delete the file."""


class ShmNames:
    """Names in the machine's shared memory that vanish with this process, also by kill -9."""

    def __init__(self) -> None:
        self.prefix = f"slime-{os.getpid()}-{secrets.token_hex(4)}-"
        # Waits for the end of its input, which is the end of this process, and cleans up behind it.
        self._cleaner = subprocess.Popen(
            ["/bin/sh", "-c", 'read -r _; rm -f "$0"*', str(_SHM / self.prefix)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._count = 0

    def new(self) -> Path:
        """An unused name."""
        self._count += 1
        return _SHM / f"{self.prefix}{self._count}"

    def close(self) -> None:
        """Take all names away."""
        if self._cleaner.stdin is not None:
            self._cleaner.stdin.close()
        self._cleaner.wait()


class BucketBuffer:
    """Shared memory that can be given any number of names (Linux)."""

    def __init__(self, names: ShmNames) -> None:
        self._names = names
        self._path: Path | None = None
        self._mapping: mmap.mmap | None = None
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._links: list[Path] = []

    def reserve(self, size: int) -> None:
        """Hold room for a bucket of `size` bytes, alignment included, from now on.

        Raises:
            EngineError: the machine's shared memory is full.
        """
        if size <= len(self._bytes):
            return
        self.close()
        self._path = self._names.new()
        try:
            with self._path.open("x+b") as file:
                os.posix_fallocate(file.fileno(), 0, _HEADER + size)
                self._mapping = mmap.mmap(file.fileno(), _HEADER + size)
        except OSError as error:
            self.close()
            raise _no_room(f"set aside {size} bytes for weights", error) from error
        self._bytes = torch.frombuffer(self._mapping, dtype=torch.uint8, offset=_HEADER)

    def fill(self, bucket: Sequence[Outgoing], readers: int) -> list[str]:
        """Copy the weights in; a message for each reader, valid until the next call.

        Raises:
            EngineError: the machine's shared memory is full.
        """
        places = _places(bucket)
        size = places[-1][1]
        self.release()
        self.reserve(size)
        for item, (start, end) in zip(bucket, places, strict=True):
            target = self._bytes[start:end].view(item.dtype).view(item.tensor.shape)
            target.copy_(item.tensor.detach())
        return [message(_mapped(self._link(), size), bucket, places) for _ in range(readers)]

    def release(self) -> None:
        """Take away names that readers left."""
        for link in self._links:
            link.unlink(missing_ok=True)
        self._links.clear()

    def close(self) -> None:
        """Give the memory up; a process that maps it keeps it."""
        self.release()
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._mapping = None
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    def _link(self) -> str:
        """A name for one reader: torch deletes it when that has read."""
        assert self._path is not None and self._mapping is not None
        self._mapping[: len(_REFERENCES)] = _REFERENCES
        link = self._names.new()
        try:
            link.hardlink_to(self._path)
        except OSError as error:
            raise _no_room("name the memory of weights", error) from error
        self._links.append(link)
        return f"/{link.name}"


def _no_room(what: str, error: OSError) -> EngineError:
    full = error.errno == errno.ENOSPC
    return EngineError(
        f"cannot {what}: {error.strerror}",
        place=str(_SHM),
        remedy="give a smaller --update-weight-buffer-size, or more shared memory" if full else None,
    )


class _Call:
    """Pickles as the call of a function."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._function, self._arguments = function, arguments

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self._function, self._arguments


def _mapped(name: str, size: int) -> _Call:
    """Bytes in shared memory, as torch shares tensors by the strategy ``file_system``.

    Without the name of a torch_shm_manager: the reader uses its own, and this process needs none.
    """
    storage = _Call(rebuild_storage_filename, torch.UntypedStorage, b"", name.encode(), size)
    typed = _Call(rebuild_typed_storage, storage, torch.uint8)
    return _Call(rebuild_tensor, torch.Tensor, typed, (0, torch.Size([size]), (1,), False))


def device_message(bucket: Sequence[Outgoing]) -> tuple[str, torch.Tensor]:
    """The message for weights on a GPU, through CUDA IPC, and the memory that it points to, to be held."""
    places = _places(bucket)
    flat = torch.empty(places[-1][1], dtype=torch.uint8, device=bucket[0].tensor.device)
    for item, (start, end) in zip(bucket, places, strict=True):
        flat[start:end].view(item.dtype).view(item.tensor.shape).copy_(item.tensor.detach())
    return message(flat, bucket, places), flat


def message(flat: Any, bucket: Sequence[Outgoing], places: Sequence[tuple[int, int]]) -> str:
    """SGLang's ``flattened_bucket``: bytes, and what lies where in them.

    Source: sglang.srt.weight_sync.tensor_bucket; its server copies the entries' fields into its own class.
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


def room(sizes: Sequence[int], buffer_size: int) -> tuple[int, ...]:
    """Bytes that buffers need for buckets of at most `buffer_size` of tensors of these sizes, in any order:
    of two that take turns, or of the one bucket that holds all.
    """
    if not sizes:
        return ()
    padding, whole = _ALIGNMENT * len(sizes), sum(sizes)
    if whole <= buffer_size:
        return (whole + padding,)
    return (max(buffer_size, *sizes) + padding,) * 2


def _places(bucket: Sequence[Outgoing]) -> list[tuple[int, int]]:
    places: list[tuple[int, int]] = []
    for item in bucket:
        start = -(-places[-1][1] // _ALIGNMENT) * _ALIGNMENT if places else 0
        places.append((start, start + item.nbytes))
    return places

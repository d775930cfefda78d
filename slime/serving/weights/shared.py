"""`SharedWeights`: all weights of a model in one shared memory file, so that a swap copies nothing.

The file is a valid safetensors file; each process maps it shared and gets tensors that alias it. Invariant: a
change in one process is seen by all at once, so whoever writes must have paused the readers. The creator owns
the file and unlinks it, or hides it at once so that even a crash leaves nothing.
"""

from __future__ import annotations

import errno
import json
import logging
import math
import mmap
import os
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from slime.errors import ModelError

_SHM = Path("/dev/shm")
_ALIGNMENT = 64
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}
_logger = logging.getLogger(__name__)


class SharedWeights:
    """A mapped weight file.

    Attributes:
        path: the file.
        inode: (device, inode) of the mapped file; a new file at the same path has another.
        views: tensors by name that alias the file; writing to one changes it for every process.
    """

    def __init__(self, path: Path, mapping: mmap.mmap, inode: tuple[int, int]) -> None:
        self.path = path
        self.inode = inode
        self._mapping: mmap.mmap | None = mapping
        self._descriptor: int | None = None
        self.views = _views(mapping, path)

    @classmethod
    def create(
        cls, named_tensors: Iterable[tuple[str, torch.Tensor]], path: Path | None = None
    ) -> SharedWeights:
        """Lay the tensors out in a new file, copy their values in and map it.

        See `reserve`.
        """
        tensors = dict(named_tensors)
        shared = cls.reserve(tensors.items(), path)
        for name, view in shared.views.items():
            view.copy_(tensors[name].detach())
        return shared

    @classmethod
    def reserve(
        cls, named_tensors: Iterable[tuple[str, torch.Tensor]], path: Path | None = None
    ) -> SharedWeights:
        """Lay the tensors out in a new file and map it; no value is looked at.

        Args:
            named_tensors: (name, tensor) pairs, float32, bfloat16 or float16, each name once.
            path: the file; None makes one in /dev/shm or, where that lacks room, in the temporary folder.

        Raises:
            ModelError: a dtype that cannot be shared, or no room.
        """
        tensors = dict(named_tensors)
        header, size = _layout(tensors)
        target = _new_file(len(header) + size) if path is None else _reserved(path, len(header) + size)
        with target.open("r+b") as file:
            file.write(header)
        return cls.open(target)

    @classmethod
    def open(cls, path: str | Path) -> SharedWeights:
        """Map an existing file.

        Raises:
            ModelError: missing, or not in safetensors layout.
        """
        path = Path(path)
        try:
            with path.open("r+b") as file:
                status = os.fstat(file.fileno())
                mapping = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_SHARED)
        except (OSError, ValueError) as error:
            raise ModelError(f"cannot map the weight file: {error}", place=str(path)) from error
        return cls(path, mapping, (status.st_dev, status.st_ino))

    def hide(self) -> None:
        """Take the file's name away, so that nothing is left of it however its processes end (Linux).

        `path` then leads through this process: others can map it as long as this process lives.
        """
        if not sys.platform.startswith("linux"):
            return
        self._descriptor = os.open(self.path, os.O_RDWR)
        self.path.unlink()
        self.path = Path(f"/proc/{os.getpid()}/fd/{self._descriptor}")

    def close(self) -> None:
        """Forget the views. The memory is unmapped when the last tensor that aliases it is gone."""
        self.views = {}
        self._mapping = None

    def unlink(self) -> None:
        """Delete the file; processes that mapped it keep their mapping."""
        if self._descriptor is None:
            self.path.unlink(missing_ok=True)
        else:
            os.close(self._descriptor)
            self._descriptor = None


def _layout(tensors: Mapping[str, torch.Tensor]) -> tuple[bytes, int]:
    """Header, and bytes of data behind it.

    The format allows no holes: tensors of whole 64-byte lines come first, so that all of them are aligned.
    """
    entries: dict[str, Any] = {}
    offset = 0
    for name in sorted(tensors, key=lambda name: _placing(tensors[name])):
        tensor = tensors[name]
        if tensor.dtype not in _CODES:
            known = ", ".join(str(dtype) for dtype in _CODES)
            raise ModelError(f"weight has dtype {tensor.dtype}; sharing knows {known}", place=name)
        end = offset + tensor.numel() * tensor.element_size()
        entries[name] = {
            "dtype": _CODES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    padded = math.ceil((8 + len(text)) / _ALIGNMENT) * _ALIGNMENT - 8
    return padded.to_bytes(8, "little") + text.ljust(padded), offset


def _placing(tensor: torch.Tensor) -> tuple[bool, int]:
    return tensor.numel() * tensor.element_size() % _ALIGNMENT != 0, -tensor.element_size()


def _views(mapping: mmap.mmap, path: Path) -> dict[str, torch.Tensor]:
    try:
        start = 8 + int.from_bytes(mapping[:8], "little")
        entries = json.loads(mapping[8:start])
        entries.pop("__metadata__", None)
        return {name: _view(mapping, start, entry) for name, entry in entries.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise ModelError(f"is not a safetensors file that can be shared: {error}", place=str(path)) from error


def _view(mapping: mmap.mmap, start: int, entry: Mapping[str, Any]) -> torch.Tensor:
    dtype, shape = _DTYPES[entry["dtype"]], tuple(entry["shape"])
    count = math.prod(shape)
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    offset = start + entry["data_offsets"][0]
    return torch.frombuffer(mapping, dtype=dtype, count=count, offset=offset).view(shape)


def _new_file(size: int) -> Path:
    if _SHM.is_dir():
        try:
            return _reserved(_unused_path(_SHM), size)
        except (ModelError, OSError) as error:
            _logger.warning("shared weights go to %s instead: %s", tempfile.gettempdir(), error)
    return _reserved(_unused_path(Path(tempfile.gettempdir())), size)


def _unused_path(folder: Path) -> Path:
    descriptor, name = tempfile.mkstemp(prefix="slime-weights-", suffix=".safetensors", dir=folder)
    os.close(descriptor)
    return Path(name)


def _reserved(path: Path, size: int) -> Path:
    """The file at its full size and really set aside: a full disk is an error now, not a SIGBUS later."""
    try:
        with path.open("wb") as file:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, size)
            else:
                file.truncate(size)
    except OSError as error:
        path.unlink(missing_ok=True)
        remedy = "free some space or choose another folder" if error.errno == errno.ENOSPC else None
        raise ModelError(
            f"cannot set aside {size} bytes for weights: {error.strerror}", place=str(path), remedy=remedy
        ) from error
    return path

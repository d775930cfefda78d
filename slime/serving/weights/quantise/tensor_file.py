"""`TensorFile`: a safetensors file that is written tensor by tensor.

Invariant: the header stands first, from names, dtypes and shapes alone; each tensor goes to its place when it
comes, so that no more than one is in memory. Knows nothing of models.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class TensorFile:
    """A file under way.

    Attributes:
        size: bytes of all tensors.
    """

    def __init__(
        self, path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
    ) -> None:
        """Write the header.

        Args:
            tensors: each with its shape and dtype; values are not looked at.
            metadata: free text entries of the header.
        """
        header, self._places, self.size = _layout(tensors, {"format": "pt"} | dict(metadata or {}))
        self._start = len(header)
        self._missing = {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
        self._file = path.open("wb")
        self._file.write(header)
        self._file.truncate(self._start + self.size)

    def write(self, name: str, tensor: Tensor) -> None:
        """Put a tensor of the announced shape and dtype into its place, once."""
        assert self._missing.pop(name) == (tensor.shape, tensor.dtype), name
        self._file.seek(self._start + self._places[name])
        self._file.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)

    def close(self) -> None:
        """End the file."""
        self._file.close()

    @property
    def is_complete(self) -> bool:
        """Whether every tensor has been written."""
        return not self._missing


def _layout(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> tuple[bytes, dict[str, int], int]:
    """Header, places and size; wide dtypes come first, so that every tensor is aligned for its own."""
    entries: dict[str, Any] = {"__metadata__": metadata}
    places, offset = {}, 0
    for name in sorted(tensors, key=lambda name: (-tensors[name].element_size(), name)):
        tensor, places[name] = tensors[name], offset
        offset += tensor.numel() * tensor.element_size()
        entries[name] = {
            "dtype": CODES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [places[name], offset],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    return len(text).to_bytes(8, "little") + text, places, offset

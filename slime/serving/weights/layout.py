"""The layout of a Hugging Face folder: where each tensor lies in its safetensors files. No value is read.

Invariant: what `read_layout` returns covers every tensor of the folder once. Knows nothing of models.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime.errors import ModelError

if TYPE_CHECKING:
    import torch

INDEX = "model.safetensors.index.json"
HEAD, EMBEDDING = "lm_head.weight", "embed_tokens.weight"
"""The output layer, and how the name of the embedding ends that it may be tied to."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a folder.

    Attributes:
        file: name inside the folder.
        dtype: safetensors' code, e.g. ``BF16``.
        start, end: bytes inside the file.
    """

    file: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def read_layout(folder: Path) -> dict[str, StoredTensor]:
    """All tensors of the folder by name, from the headers of its files.

    Raises:
        ModelError: no safetensors there, a broken header, or a tensor that two files hold.
    """
    found: dict[str, StoredTensor] = {}
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelError("no .safetensors files in the folder", place=str(folder))
    for path in files:
        for name, stored in _header(path).items():
            if name in found:
                raise ModelError(f"{name} is in {found[name].file} and in {path.name}", place=str(folder))
            found[name] = stored
    return found


def header_metadata(path: Path) -> dict[str, str]:
    """The free text entries of a safetensors file.

    Raises:
        ModelError: a broken header.
    """
    return {str(k): str(v) for k, v in _raw_header(path)[0].get("__metadata__", {}).items()}


def is_tied(name: str, folder: Path) -> bool:
    """Whether a stored tensor is only another name of the embedding, by the folder's config."""
    if name != HEAD:
        return False
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read config.json: {error}", place=str(folder)) from error
    return bool(config.get("tie_word_embeddings", False))


def read_tensor(folder: Path, name: str, stored: StoredTensor) -> torch.Tensor:
    """The values of one tensor."""
    from safetensors import safe_open

    with safe_open(folder / stored.file, "pt") as file:
        tensor: torch.Tensor = file.get_tensor(name)
    return tensor


def torch_dtype(code: str) -> torch.dtype | None:
    """The floating dtype of a safetensors code, among those that weights are trained in; None for others."""
    import torch

    return {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}.get(code)


def _header(path: Path) -> dict[str, StoredTensor]:
    entries, data = _raw_header(path)
    try:
        return {
            name: StoredTensor(
                path.name,
                entry["dtype"],
                tuple(entry["shape"]),
                data + entry["data_offsets"][0],
                data + entry["data_offsets"][1],
            )
            for name, entry in entries.items()
            if name != "__metadata__"
        }
    except (KeyError, TypeError, IndexError) as error:
        raise ModelError(f"broken header: {error!r}", place=str(path)) from error


def _raw_header(path: Path) -> tuple[dict[str, Any], int]:
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            entries = json.loads(file.read(length))
    except (OSError, ValueError) as error:
        raise ModelError(f"not a safetensors file: {error}", place=str(path)) from error
    if not isinstance(entries, dict):
        raise ModelError("not a safetensors file", place=str(path))
    return entries, 8 + length

"""`WeightFolder`: the weights of a Hugging Face folder, one at a time, as they are stored or as they are
meant.

Invariant: at most one weight is in memory; every stored tensor is a weight, a part of one, or an error that
names it. Reads safetensors only. Knows files; writes nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from slime.errors import ModelError
from slime.serving.weights.quantise.names import WEIGHT, dequantise_weight, parts_of
from slime.serving.weights.quantise.scheme import Int4, Scheme, quantisation_of
from slime.serving.weights.quantise.tensor_file import CODES

_DTYPES = {code: dtype for dtype, code in CODES.items()}
_PARTS = (
    *("weight_packed", "weight_scale", "weight_scale_inv", "weight_shape"),
    *("weight_zero_point", "weight_g_idx", "input_scale"),
)


class WeightFolder:
    """An opened folder.

    Attributes:
        config: what its config.json holds.
        shards: names of the stored tensors by file, in the files' order.
    """

    def __init__(self, path: str | Path) -> None:
        """Look at config and headers.

        Raises:
            ModelError: no config.json or no safetensors, or a file that cannot be read.
        """
        self.path = Path(path)
        self.config = read_config(self.path)
        self._quantisation = quantisation_of(self.config, str(self.path / "config.json"))
        self._files = {file.name: _opened(file) for file in sorted(self.path.glob("*.safetensors"))}
        self.shards: dict[str, list[str]] = {name: list(file.keys()) for name, file in self._files.items()}
        if not self.shards:
            raise ModelError("no .safetensors files in the folder", place=str(path))
        self._file_of = {name: file for file, names in self.shards.items() for name in names}
        self._schemes = {name: s for name in self._weights() if (s := self._scheme(name)) is not None}
        taken = {part for name, scheme in self._schemes.items() for part in parts_of(name, scheme)}
        stray = [n for n in self._file_of if n.rpartition(".")[2] in _PARTS and n not in taken]
        if stray:
            raise ModelError(
                f"{len(stray)} parts of quantised weights belong to none that config.json tells of, "
                f"first {stray[0]!r}",
                place=str(path),
            )
        self._parts = taken

    @property
    def names(self) -> frozenset[str]:
        """Names of all stored tensors."""
        return frozenset(self._file_of)

    def weight_names(self, file: str) -> list[str]:
        """Names of the weights whose first part this file holds."""
        firsts = {parts_of(name, scheme)[0]: name for name, scheme in self._schemes.items()}
        return [firsts.get(n, n) for n in self.shards[file] if n in firsts or n not in self._parts]

    def weight(self, name: str) -> Tensor:
        """The weight of this name; a quantised one in float32."""
        scheme = self._schemes.get(name)
        if scheme is not None:
            return dequantise_weight(name, scheme, self.stored)
        weight = self.stored(name)
        if weight.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
            raise ModelError(
                f"is {weight.dtype}, and config.json does not tell its scales", place=f"{self.path}, {name}"
            )
        return weight

    def lazy_weights(self) -> dict[str, LazyWeight]:
        """All weights by name, to be read one by one: a state dict for transformers' `from_pretrained`."""
        names = (name for file in self.shards for name in self.weight_names(file))
        return {name: LazyWeight(self, name) for name in names}

    def meta(self, name: str) -> Tensor:
        """Shape and dtype of `weight(name)`, on the meta device."""
        scheme = self._schemes.get(name)
        if isinstance(scheme, Int4):
            return torch.empty(*self.stored(parts_of(name, scheme)[2]).tolist(), device="meta")
        part = self._file(name).get_slice(name)
        dtype = torch.float32 if scheme is not None else _DTYPES[part.get_dtype()]
        return torch.empty(part.get_shape(), dtype=dtype, device="meta")

    def stored(self, name: str) -> Tensor:
        """A tensor as it is stored.

        Raises:
            ModelError: there is none of this name.
        """
        if name not in self._file_of:
            raise ModelError("there is no such tensor", place=f"{self.path}, {name}")
        tensor: Tensor = self._file(name).get_tensor(name)
        return tensor

    def _file(self, name: str) -> Any:
        return self._files[self._file_of[name]]

    def _weights(self) -> Iterator[str]:
        for name in self._file_of:
            stem, _, last = name.rpartition(".")
            if last in ("weight", "weight_packed"):
                yield stem + WEIGHT

    def _scheme(self, name: str) -> Scheme | None:
        if self._quantisation is None:
            return None
        listed = self._quantisation.scheme_of(name.removesuffix(WEIGHT), linear=True)
        schemes = [listed] if listed else [rule.scheme for rule in self._quantisation.rules]
        return next((s for s in schemes if all(p in self._file_of for p in parts_of(name, s))), None)


@dataclass(frozen=True, slots=True)
class LazyWeight:
    """A weight that is read when it is indexed by ``...``, as a slice of a safetensors file is."""

    folder: WeightFolder
    name: str

    def __getitem__(self, index: object) -> Tensor:
        return self.folder.weight(self.name)


def read_config(folder: Path) -> Mapping[str, Any]:
    """What the folder's config.json holds.

    Raises:
        ModelError: missing, or not a JSON object.
    """
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot be read: {error}", place=str(path)) from error
    if not isinstance(config, dict):
        raise ModelError("is not a JSON object", place=str(path))
    return config


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, "pt")
    except (OSError, SafetensorError) as error:
        raise ModelError(f"not a safetensors file: {error}", place=str(path)) from error

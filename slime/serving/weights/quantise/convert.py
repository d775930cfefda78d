"""A Hugging Face folder written anew with its weights in another form.

Invariant: weights that the form does not concern come out bit for bit (or in the dtype that is asked for);
one weight is in memory at a time; no pickle is read or copied. Knows folders; knows no command line.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slime.errors import ModelError
from slime.serving.weights.quantise.folder import WeightFolder
from slime.serving.weights.quantise.forms import section_of
from slime.serving.weights.quantise.names import WEIGHT
from slime.serving.weights.quantise.quantiser import Quantiser, quantiser_of
from slime.serving.weights.quantise.scheme import is_head, is_linear, matches
from slime.serving.weights.quantise.tensor_file import TensorFile

_INDEX = "model.safetensors.index.json"
_PICKLES = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """How weights are written.

    Attributes:
        form: one of `forms.FORMS`.
        size: rows and columns of a block, or inputs of a group.
        dtype: of what is not quantised; None is the dtype that it has (float32 for what was quantised).
        keep: modules that are not quantised: names, ends of names, or ``re:`` and a regular expression.
    """

    form: str
    size: int
    dtype: torch.dtype | None = None
    keep: Sequence[str] = ()


def convert_folder(source: Path, output: Path, target: Target) -> None:
    """Fill the folder `output`, which is there, with the model of `source`.

    Raises:
        ModelError: a folder or a config that cannot be used, or a weight that the form cannot hold.
    """
    folder = WeightFolder(source)
    shapes = {name: _shape(folder, name, target) for f in folder.shards for name in folder.weight_names(f)}
    config = _config(folder, shapes, target)
    quantise = quantiser_of(config)
    index: dict[str, str] = {}
    total = 0
    for file in folder.shards:
        names = folder.weight_names(file)
        stored = {part: meta for name in names for part, meta in quantise(name, shapes[name])}
        total += _write(output / file, stored, _weights(folder, names, target, quantise))
        index |= dict.fromkeys(stored, file)
    if len(folder.shards) > 1:
        _write_json(output / _INDEX, {"metadata": {"total_size": total}, "weight_map": index})
    _write_json(output / "config.json", config)
    _copy_others(source, output)


def _shape(folder: WeightFolder, name: str, target: Target) -> Tensor:
    """The weight as it will be before it is quantised, without its values."""
    meta = folder.meta(name)
    return meta.to(_dtype(meta, target))


def _weights(
    folder: WeightFolder, names: Sequence[str], target: Target, quantise: Quantiser
) -> Iterator[tuple[str, Tensor]]:
    for name in names:
        weight = folder.weight(name)
        yield from quantise(name, weight.to(_dtype(weight, target)))


def _dtype(weight: Tensor, target: Target) -> torch.dtype:
    return target.dtype if target.dtype is not None and weight.is_floating_point() else weight.dtype


def _write(path: Path, stored: dict[str, Tensor], weights: Iterator[tuple[str, Tensor]]) -> int:
    """One file; returns the bytes of its tensors."""
    file = TensorFile(path, stored)
    try:
        for name, tensor in weights:
            file.write(name, tensor)
    finally:
        file.close()
    assert file.is_complete
    return file.size


def _config(folder: WeightFolder, shapes: dict[str, Tensor], target: Target) -> dict[str, Any]:
    """config.json of what is written."""
    config = dict(folder.config)
    for key in ("quantization_config", "compression_config"):
        config.pop(key, None)
    if target.dtype is not None:
        config.pop("torch_dtype", None)
        config["dtype"] = str(target.dtype).removeprefix("torch.")
    section = section_of(target.form, target.size, _kept(shapes, target.keep))
    return config if section is None else config | {"quantization_config": section}


def _kept(shapes: dict[str, Tensor], keep: Sequence[str]) -> list[str]:
    """Linear layers that stay as they are: output layers, routers, and those that the user names.

    Raises:
        ModelError: a name that fits none.
    """
    modules = {n.removesuffix(WEIGHT): t.shape for n, t in shapes.items() if n.endswith(WEIGHT)}
    for pattern in keep:
        if not any(matches(pattern, module) for module in modules):
            raise ModelError("fits no module of the model", place=f"--keep {pattern}")
    return [
        module
        for module, shape in modules.items()
        if len(shape) == 2
        and (is_head(module) or not is_linear(module, shape) or any(matches(k, module) for k in keep))
    ]


def _copy_others(source: Path, output: Path) -> None:
    """Tokenizer, templates, licences and the like; neither weights nor folders."""
    for path in sorted(source.iterdir()):
        is_weight = path.suffix in (".safetensors", *_PICKLES) or path.name.endswith(".index.json")
        if path.is_file() and not is_weight and not (output / path.name).exists():
            shutil.copyfile(path, output / path.name)


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")

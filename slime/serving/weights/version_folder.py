"""`new_version`: a folder ``weight_vNNNNNN`` of safetensors files, there whole or not at all.

Invariant: it is written beside its place and renamed; what an earlier run left at its place is replaced only
if it is such a folder. Knows tensors by name, and nothing of engines.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime.errors import CheckpointError, ModelError
from slime.serving.weights.layout import INDEX

if TYPE_CHECKING:
    import torch

_logger = logging.getLogger(__name__)
_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx"}


class FolderWriter:
    """A folder on its way."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._shards: list[list[str]] = []
        self.bytes = 0

    def shard(self, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None) -> None:
        """Write one file."""
        from slime.serving.weights.quantise.tensor_file import TensorFile

        path = self._folder / _shard_name(len(self._shards), None)
        file = TensorFile(path, tensors, metadata)
        try:
            for name, tensor in tensors.items():
                file.write(name, tensor.cpu())
        finally:
            file.close()
        self._shards.append([*tensors])
        self.bytes += path.stat().st_size

    def copy_others(self, checkpoint: Path) -> None:
        """Take what is no weight from a model folder: config, tokenizer, chat template."""
        for path in sorted(checkpoint.iterdir()):
            if path.is_file() and path.suffix not in _WEIGHTS and not path.name.endswith(".index.json"):
                shutil.copyfile(path, self._folder / path.name)

    def finish(self, metadata: Mapping[str, Any]) -> None:
        """Name the files by their number, and write the index."""
        count = len(self._shards)
        weight_map: dict[str, str] = {}
        for number, names in enumerate(self._shards):
            name = _shard_name(number, count)
            (self._folder / _shard_name(number, None)).rename(self._folder / name)
            weight_map |= dict.fromkeys(names, name)
        index = {"metadata": dict(metadata), "weight_map": weight_map}
        (self._folder / INDEX).write_text(json.dumps(index, indent=1), encoding="utf-8")


def version_path(root: Path, version: int) -> Path:
    """Where a version lies."""
    return root / f"weight_v{version:06d}"


@contextmanager
def new_version(root: Path, version: int) -> Iterator[FolderWriter]:
    """Write a version; at the end of the block, which calls `finish`, it is at `version_path`.

    Raises:
        CheckpointError: no space, no rights, or something else lies at its place. Nothing is left.
    """
    final = version_path(root, version)
    beside = final.with_name(f".{final.name}.new")
    try:
        if final.exists() and not (final / INDEX).is_file():
            raise CheckpointError("is there, and is no version of weights", place=str(final))
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir(parents=True)
        yield FolderWriter(beside)
        shutil.rmtree(final, ignore_errors=True)
        beside.rename(final)
    except OSError as error:
        raise CheckpointError(
            f"the weights cannot be written: {error}", place=str(final), remedy="--update-weight-disk-dir"
        ) from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def remove_version(folder: Path) -> None:
    """Delete a version that all engines have loaded; one that stays is told, since the disk fills up."""
    try:
        shutil.rmtree(folder)
    except OSError as error:
        _logger.warning("%s is not needed any more and cannot be removed: %s", folder, error)


def read_index(folder: Path) -> dict[str, Any]:
    """What the index says of the folder beside where its tensors lie.

    Raises:
        ModelError: there is none, or it is broken.
    """
    try:
        metadata = json.loads((folder / INDEX).read_text(encoding="utf-8"))["metadata"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"is no published version of weights: {error!r}", place=str(folder)) from error
    if not isinstance(metadata, dict):
        raise ModelError("is no published version of weights", place=str(folder))
    return metadata


def _shard_name(number: int, count: int | None) -> str:
    total = "NNNNN" if count is None else f"{count:05d}"
    return f"model-{number:05d}-of-{total}.safetensors"

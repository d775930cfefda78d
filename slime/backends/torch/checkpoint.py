"""Checkpoints on disk: safetensors and JSON, written whole or not at all.

Invariant: a folder with a manifest is complete; it appears by one rename, and replaces only a folder that
slime wrote. Each rank writes the rows that it holds; any number of ranks reads them. No pickle is written or
read. Knows tensors by name; knows no trainer.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from slime.backends.folder import MARKER, mark, may_replace
from slime.backends.torch.ranks import ALONE, Ranks
from slime.backends.torch.sharding import is_spread, own, own_rows
from slime.errors import CheckpointError

MANIFEST = "trainer.json"
FORMAT = 2
_ROWS = "rows"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What one rank writes.

    Attributes:
        weights: by Hugging Face name, tied weights once; of spread ones this rank's rows are written.
        optimizer: moments by name, likewise; empty where the state was left out.
        rng: states of this process's random generators.
        counters: plain JSON values, equal on all ranks.
    """

    weights: Mapping[str, torch.Tensor]
    optimizer: Mapping[str, torch.Tensor]
    rng: Mapping[str, torch.Tensor]
    counters: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor on disk, in the pieces that the ranks wrote.

    Attributes:
        shape: of the whole.
        pieces: open file, and the rows that it holds.
    """

    name: str
    shape: tuple[int, ...]
    pieces: tuple[tuple[Any, int, int], ...]

    def rows(self, first: int, last: int) -> torch.Tensor:
        """Rows `first` to `last` (exclusive) of the first dimension; a scalar is one row.

        Raises:
            CheckpointError: the files do not hold them.
        """
        if not self.shape:
            return self._read(self.pieces[0][0], 0, 1)
        if first == last:
            return self._read(self.pieces[0][0], 0, 0)
        found = [
            self._read(file, max(first, start) - start, min(last, stop) - start)
            for file, start, stop in self.pieces
            if max(first, start) < min(last, stop)
        ]
        tensor = found[0] if len(found) == 1 else torch.cat(found)
        if len(tensor) != last - first:
            raise CheckpointError(f"of rows {first} to {last} there are {len(tensor)}", place=self.name)
        return tensor

    def whole(self) -> torch.Tensor:
        """All rows."""
        return self.rows(0, self.shape[0] if self.shape else 1)

    def _read(self, file: Any, start: int, stop: int) -> torch.Tensor:
        try:
            tensor: torch.Tensor = (
                file.get_slice(self.name)[start:stop] if self.shape else file.get_tensor(self.name)
            )
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"cannot be read: {error}", place=self.name) from error
        return tensor


@dataclass(frozen=True, slots=True)
class StoredCheckpoint:
    """What is in a checkpoint folder.

    Attributes:
        rng: of each rank that wrote it.
    """

    weights: Mapping[str, StoredTensor]
    optimizer: Mapping[str, StoredTensor]
    rng: tuple[Mapping[str, torch.Tensor], ...]
    counters: Mapping[str, Any]


def write_checkpoint(folder: Path, checkpoint: Checkpoint, ranks: Ranks = ALONE) -> None:
    """Write below `folder`, replacing what slime wrote there before; a call of all ranks together.

    Raises:
        CheckpointError: no space, the folder cannot be written, or it holds something that slime did not
            write. Nothing half-written is left, and what is in `folder` stays as it was.
    """
    parts = {"model": checkpoint.weights, "optimizer": checkpoint.optimizer, "rng": checkpoint.rng}

    def write(place: Path) -> None:
        for name, tensors in parts.items():
            if tensors:
                _write_part(_file(place, name, ranks.rank, ranks.size), tensors)
        if ranks.is_first:
            manifest = {
                "format": FORMAT,
                "ranks": ranks.size,
                "parts": [name for name, tensors in parts.items() if tensors],
                "counters": dict(checkpoint.counters),
            }
            (place / MANIFEST).write_text(json.dumps(manifest, indent=1))

    write_folder(folder, write, sum(tensor_bytes(tensors) for tensors in parts.values()), ranks)


def read_checkpoint(folder: Path) -> StoredCheckpoint:
    """Inverse of `write_checkpoint`, by any number of ranks; weights are read when they are asked for.

    Raises:
        CheckpointError: no checkpoint, an unknown format, or a file that does not read.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise CheckpointError(f"there is no checkpoint here ({MANIFEST} is missing)", place=str(folder))
    try:
        manifest = json.loads(path.read_text())
        if manifest["format"] != FORMAT:
            raise CheckpointError(f"format {manifest['format']} is not known", place=str(path))
        size = manifest["ranks"]
        files = {
            part: [_file(folder, part, rank, size) for rank in range(size)] for part in manifest["parts"]
        }
        return StoredCheckpoint(
            weights=_stored(files.get("model", ())),
            optimizer=_stored(files.get("optimizer", ())),
            rng=tuple(load_file(file) for file in files.get("rng", ())),
            counters=manifest["counters"],
        )
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"cannot be read: {error}", place=str(folder)) from error


def write_folder(folder: Path, write: Callable[[Path], None], needed: int, ranks: Ranks = ALONE) -> None:
    """Let `write` of every rank fill a temporary sibling of `folder`, then rename it into place.

    Args:
        needed: bytes that this rank will write.

    Raises:
        CheckpointError: see `write_checkpoint`.
    """
    folder = folder.absolute()
    total = sum(ranks.gather(needed))
    partial = ranks.first(lambda: _begin(folder, total))
    try:
        ranks.each(lambda: _checked(lambda: write(partial), folder, total))
        ranks.first(lambda: _checked(lambda: _finish(partial, folder), folder, total))
    except CheckpointError:
        if ranks.is_first:
            shutil.rmtree(partial, ignore_errors=True)
        raise


def _begin(folder: Path, needed: int) -> Path:
    """An empty folder beside `folder`, on a disk with room."""
    if not may_replace(folder):
        raise CheckpointError(
            f"exists and was not written by slime (it has no file {MARKER}), so it is not replaced",
            place=str(folder),
            remedy="name a folder that does not exist yet, or move this one away",
        )
    partial = folder.with_name(f".{folder.name}.partial-{os.getpid()}")

    def make() -> None:
        folder.parent.mkdir(parents=True, exist_ok=True)
        if shutil.disk_usage(folder.parent).free < needed:
            raise OSError(errno.ENOSPC, "too little free space")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()

    _checked(make, folder, needed)
    return partial


def _finish(partial: Path, folder: Path) -> None:
    mark(partial)
    _sync(partial)
    _replace(partial, folder)


def _checked(action: Callable[[], None], folder: Path, needed: int) -> None:
    try:
        action()
    except (OSError, SafetensorError) as error:
        raise _write_error(folder, error, needed) from error


def _write_part(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    rows = {
        name: [*own_rows(tensor), tensor.shape[0]] for name, tensor in tensors.items() if is_spread(tensor)
    }
    values = {name: own(tensor.detach()).contiguous() for name, tensor in tensors.items()}
    save_file(values, path, metadata={_ROWS: json.dumps(rows)})


def _stored(paths: Sequence[Path]) -> dict[str, StoredTensor]:
    """The tensors of one part, put together from the files of all ranks."""
    shapes: dict[str, tuple[int, ...]] = {}
    pieces: dict[str, list[tuple[Any, int, int]]] = {}
    for path in paths:
        file: Any = safe_open(path, "pt")
        rows = json.loads((file.metadata() or {}).get(_ROWS, "{}"))
        for name in file.keys():  # noqa: SIM118
            shape = tuple(file.get_slice(name).get_shape())
            first, last, total = rows.get(name, (0, shape[0] if shape else 1, shape[0] if shape else 1))
            shapes[name] = (total, *shape[1:]) if shape else ()
            pieces.setdefault(name, []).append((file, first, last))
    return {name: StoredTensor(name, shapes[name], tuple(found)) for name, found in pieces.items()}


def tensor_bytes(tensors: Mapping[str, torch.Tensor]) -> int:
    """Bytes of all tensors; of spread ones, those of this rank."""
    return sum(own(tensor).numel() * tensor.element_size() for tensor in tensors.values())


def _file(folder: Path, part: str, rank: int, size: int) -> Path:
    number = "" if size == 1 else f"-{rank + 1:05d}-of-{size:05d}"
    return folder / f"{part}{number}.safetensors"


def _sync(folder: Path) -> None:
    for path in [*folder.rglob("*"), folder]:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _replace(partial: Path, folder: Path) -> None:
    """Rename `partial` to `folder`; the old contents go away only when the new ones stand."""
    old = folder.with_name(f".{folder.name}.old-{os.getpid()}")
    if folder.exists():
        folder.rename(old)
    try:
        partial.rename(folder)
    except OSError:
        with contextlib.suppress(FileNotFoundError):
            old.rename(folder)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _write_error(folder: Path, error: Exception, needed: int) -> CheckpointError:
    parent = next(path for path in folder.parents if path.exists())
    free = shutil.disk_usage(parent).free
    full = getattr(error, "errno", None) == errno.ENOSPC or "No space left" in str(error) or free < needed
    if full:
        return CheckpointError(
            f"the disk is full: {needed:,} bytes are needed, {free:,} are free",
            place=str(folder),
            remedy="free some space, or save elsewhere with --save",
        )
    return CheckpointError(f"cannot be written: {error}", place=str(folder))

"""Checkpoints on disk: safetensors and JSON, written whole or not at all.

Invariant: a folder with a manifest is complete; it appears by one rename, and replaces only a folder that
slime wrote. No pickle is written or read.
Knows tensors by name; knows no trainer.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from slime.backends.folder import MARKER, mark, may_replace
from slime.errors import CheckpointError

MANIFEST = "trainer.json"
FORMAT = 1


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Contents of a checkpoint folder.

    Attributes:
        weights: by Hugging Face name, tied weights once.
        optimizer: moments by name; empty where the state was left out.
        rng: states of random generators, uint8.
        counters: plain JSON values.
    """

    weights: Mapping[str, torch.Tensor]
    optimizer: Mapping[str, torch.Tensor]
    rng: Mapping[str, torch.Tensor]
    counters: Mapping[str, Any]


def write_checkpoint(folder: Path, checkpoint: Checkpoint) -> None:
    """Write below `folder`, replacing what slime wrote there before.

    Raises:
        CheckpointError: no space, the folder cannot be written, or it holds something that slime did not
            write. Nothing half-written is left, and what is in `folder` stays as it was.
    """
    parts = {"model": checkpoint.weights, "optimizer": checkpoint.optimizer, "rng": checkpoint.rng}

    def write(place: Path) -> None:
        for name, tensors in parts.items():
            if tensors:
                save_file({key: t.detach().contiguous() for key, t in tensors.items()}, _file(place, name))
        manifest = {"format": FORMAT, "parts": [n for n, t in parts.items() if t]}
        (place / MANIFEST).write_text(
            json.dumps(manifest | {"counters": dict(checkpoint.counters)}, indent=1)
        )

    write_folder(folder, write, sum(tensor_bytes(tensors) for tensors in parts.values()))


def read_checkpoint(folder: Path) -> Checkpoint:
    """Inverse of `write_checkpoint`.

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
        parts = {name: load_file(_file(folder, name)) for name in manifest["parts"]}
        counters = manifest["counters"]
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"cannot be read: {error}", place=str(folder)) from error
    return Checkpoint(parts.get("model", {}), parts.get("optimizer", {}), parts.get("rng", {}), counters)


def write_folder(folder: Path, write: Callable[[Path], None], needed: int) -> None:
    """Let `write` fill a temporary sibling of `folder`, then rename it into place.

    Args:
        needed: bytes that will be written.

    Raises:
        CheckpointError: see `write_checkpoint`.
    """
    folder = folder.absolute()
    if not may_replace(folder):
        raise CheckpointError(
            f"exists and was not written by slime (it has no file {MARKER}), so it is not replaced",
            place=str(folder),
            remedy="name a folder that does not exist yet, or move this one away",
        )
    partial = folder.with_name(f".{folder.name}.partial-{os.getpid()}")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder.parent).free
        if free < needed:
            raise OSError(errno.ENOSPC, "too little free space")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        write(partial)
        mark(partial)
        _sync(partial)
        _replace(partial, folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise _write_error(folder, error, needed) from error


def tensor_bytes(tensors: Mapping[str, torch.Tensor]) -> int:
    """Bytes of all tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def _file(folder: Path, part: str) -> Path:
    return folder / f"{part}.safetensors"


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

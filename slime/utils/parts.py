"""Parts of a checkpoint: files with size and digest, declared by the process that wrote them.

Invariant: a part is declared only when its bytes and its name are on the disk (fsync of file and folders), so
a manifest that lists declared parts is true after any crash. Paths are relative to the checkpoint's root, and
the whole may be moved. Knows nothing of what the files hold; imports no torch.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from slime.errors import CheckpointError

READERS = 8
"""Threads that read files for their digest: hashing lets go of the interpreter, and disks like a queue."""


@dataclass(frozen=True, slots=True)
class Part:
    """One file.

    Attributes:
        path: below the checkpoint's root, with forward slashes.
        size: bytes.
        sha256: hexadecimal.
    """

    path: str
    size: int
    sha256: str


def declare(root: Path, files: Iterable[Path]) -> list[Part]:
    """Make files durable and take their digests; call it where they were written, after the last byte.

    Raises:
        CheckpointError: a file is not there, or the disk does not take or give its bytes.
        ValueError: a file is not below `root`.
    """
    files = sorted(files)

    def one(file: Path) -> Part:
        sync(file)
        return Part(file.relative_to(root).as_posix(), file.stat().st_size, _digest(file))

    try:
        with ThreadPoolExecutor(READERS) as readers:
            parts = list(readers.map(one, files))
        for folder in {folder for file in files for folder in file.relative_to(root).parents}:
            sync(root / folder)
    except OSError as error:
        raise CheckpointError(
            f"is not on the disk: {error.strerror}",
            place=str(error.filename or root),
            remedy="check --save and the disk",
        ) from error
    return parts


def files_below(folder: Path) -> list[Path]:
    """All files of a folder, at any depth."""
    return [path for path in folder.rglob("*") if path.is_file()]


def faults(root: Path, parts: Iterable[Part]) -> list[str]:
    """What is wrong with the parts on disk, one text a bad part; sizes are looked at before contents."""
    listed = list(parts)
    wrong = [fault for part in listed if (fault := _size_fault(root, part)) is not None]
    if wrong:
        return wrong
    with ThreadPoolExecutor(READERS) as readers:
        found = readers.map(lambda part: _content_fault(root, part), listed)
        return [fault for fault in found if fault is not None]


def write_durably(path: Path, text: str) -> None:
    """Write a small file whole or not at all, also across a power failure.

    Raises:
        OSError: it cannot be written.
    """
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    sync(partial)
    partial.replace(path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Flush a file or a folder to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _size_fault(root: Path, part: Part) -> str | None:
    path = root / part.path
    if not path.is_file():
        return f"{part.path} is missing"
    size = path.stat().st_size
    return None if size == part.size else f"{part.path} has {size} bytes of {part.size}"


def _content_fault(root: Path, part: Part) -> str | None:
    try:
        digest = _digest(root / part.path)
    except OSError as error:
        return f"{part.path} cannot be read: {error.strerror}"
    return None if digest == part.sha256 else f"{part.path} holds other bytes than were written"


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

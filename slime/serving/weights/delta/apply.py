"""`pull`: bring a local folder to a published version.

Invariant: `local` is a link to a folder that is one whole version, at every moment: the next one is made
beside it, each changed tensor is checked against its checksum there, and the link is replaced in one step. A
failure leaves the old version; a crash leaves remains too, which the next call clears away. Knows files only.
"""

from __future__ import annotations

import fcntl
import json
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np

from slime.errors import CheckpointError, ModelError
from slime.serving.weights.delta.checksum import checksum_of, decompressed
from slime.serving.weights.delta.encoding import apply
from slime.serving.weights.layout import header_metadata, read_layout
from slime.serving.weights.version_folder import read_index

LOCK_SECONDS = 600.0
"""What another engine of the machine gets to bring the same folder up to date."""
LOCK_POLL_SECONDS = 0.05
_MARKER = ".slime-version.json"


def pull(source: Path, local: Path, version: str, seed: Path, *, patience: float = LOCK_SECONDS) -> None:
    """Make `local` the version that is published in `source`, a delta or a whole folder.

    Args:
        local: where engines load from; only a folder that `pull` made, or an empty one, is replaced.
        seed: the checkpoint that deltas begin from.
        patience: seconds for others to be done with the folder.

    Raises:
        ModelError: `source` is another version; the base of its delta is not what `local` has; a tensor's
            bytes are not those that its checksum tells; another process has the folder. `local` is what it
            was.
        CheckpointError: no space, or no rights. `local` is what it was.
    """
    index = read_index(source)
    if index.get("version") != version:
        raise ModelError(f"holds version {index.get('version')}, not {version}", place=str(source))
    local = local.absolute()
    try:
        local.parent.mkdir(parents=True, exist_ok=True)
        with _locked(local, patience):
            _replace(source, local, index, seed)
    except OSError as error:
        raise CheckpointError(
            f"cannot take version {version}: {error}",
            place=str(local),
            remedy="free some space, or another --update-weight-local-checkpoint-dir",
        ) from error


def _replace(source: Path, local: Path, index: Mapping[str, Any], seed: Path) -> None:
    held = _held(local)
    if held.get("id") == index.get("id"):
        return
    _clear(local)
    beside = _beside(local, f"{index['version']}-{index.get('id')}")
    try:
        if "delta_encoding" in index:
            _patched(source, _base(index, held, local, seed), beside, index)
        else:
            shutil.copytree(source, beside)
        marker = {"version": index["version"], "id": index.get("id")}
        (beside / _MARKER).write_text(json.dumps(marker), encoding="utf-8")
        _swap(local, beside)
    finally:
        _clear(local)


def _base(index: Mapping[str, Any], held: Mapping[str, Any], local: Path, seed: Path) -> Path:
    if not index.get("base_version"):
        return seed
    if (held.get("version"), held.get("id")) != (index["base_version"], index.get("base_id")):
        raise ModelError(
            f"has version {held.get('version')}, and the delta is one to version {index['base_version']}",
            place=str(local),
            remedy="let the trainer connect anew: it then begins from the checkpoint",
        )
    return local.resolve()


def _patched(source: Path, base: Path, beside: Path, index: Mapping[str, Any]) -> None:
    """Make `beside` of `base`: files without a change are linked, others copied and patched."""
    layout = read_layout(base)
    payloads, sums = _payloads(source)
    unknown = sorted(payloads.keys() - layout.keys())
    if unknown:
        raise ModelError(f"the delta changes {unknown[0]}, which is not there", place=str(base))
    changed: dict[str, list[str]] = {}
    for name in payloads:
        changed.setdefault(layout[name].file, []).append(name)
    beside.mkdir()
    checksum = checksum_of(str(index.get("checksum_format")))
    for path in sorted(base.iterdir()):
        if path.name == _MARKER or not path.is_file():
            continue
        if path.name not in changed:
            _link(path, beside / path.name)
            continue
        shutil.copyfile(path, beside / path.name)
        data: Any = np.memmap(beside / path.name, np.uint8, "r+")
        for name in changed[path.name]:
            target = data[layout[name].start : layout[name].end]
            payload = decompressed(payloads[name].tobytes(), name)
            apply(index["delta_encoding"], payload, target, name)
            if checksum(target) != sums.get(name):
                raise ModelError(
                    "its new bytes are not those that the trainer has: another base, or a broken delta",
                    place=f"{base}, {name}",
                )


def _payloads(source: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Compressed payloads by name, mapped, and checksums."""
    payloads: dict[str, Any] = {}
    sums: dict[str, str] = {}
    files = sorted(source.glob("*.safetensors"))
    for path in files:
        sums |= header_metadata(path)
    for name, entry in read_layout(source).items() if files else ():
        data: Any = np.memmap(source / entry.file, np.uint8, "r")
        payloads[name] = data[entry.start : entry.end]
    return payloads, sums


def _link(source: Path, target: Path) -> None:
    try:
        target.hardlink_to(source.resolve())
    except OSError:  # another file system
        shutil.copyfile(source, target)


def _swap(local: Path, folder: Path) -> None:
    if local.is_dir() and not local.is_symlink():
        try:
            local.rmdir()
        except OSError as error:
            raise ModelError(
                "is a folder that holds something else",
                place=str(local),
                remedy="give --update-weight-local-checkpoint-dir a new folder",
            ) from error
    link = local.with_name(f".{local.name}.link")
    link.unlink(missing_ok=True)
    link.symlink_to(folder.name)
    link.replace(local)


def _held(local: Path) -> Mapping[str, Any]:
    """What `local` is; nothing where it is not there."""
    try:
        held = json.loads((local / _MARKER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return held if isinstance(held, dict) else {}


def _beside(local: Path, name: str) -> Path:
    return local.with_name(f".{local.name}.at-{name}")


def _clear(local: Path) -> None:
    """Remove versions beside `local` that it is not."""
    current = local.resolve()
    for path in local.parent.glob(f".{local.name}.at-*"):
        if path != current:
            shutil.rmtree(path, ignore_errors=True)


@contextmanager
def _locked(local: Path, patience: float) -> Iterator[None]:
    """One at a time: engines of a machine may share the folder.

    Raises:
        ModelError: another process has it for longer.
    """
    end = time.monotonic() + patience
    with local.with_name(f".{local.name}.lock").open("w") as file:
        while not _taken(file):
            if time.monotonic() > end:
                raise ModelError(
                    f"is held by another process for {patience:.3g} s",
                    place=str(local),
                    remedy="end what writes there, or give each engine's machine a folder of its own "
                    "(--update-weight-local-checkpoint-dir)",
                )
            time.sleep(LOCK_POLL_SECONDS)
        yield


def _taken(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True

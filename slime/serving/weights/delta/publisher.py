"""`DeltaPublisher`: every version as the bytes that changed since the one before.

Invariant: the snapshot is what engines have: the checkpoint that they serve at first, and whenever the
engines are others or a version was not written whole; after each version, that. Knows bytes and files.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from slime.serving.weights.delta.checksum import checksum_of, compressed
from slime.serving.weights.delta.encoding import Bytes, Encoding, encode
from slime.serving.weights.layout import EMBEDDING, HEAD, StoredTensor, is_tied
from slime.serving.weights.outgoing import Outgoing
from slime.serving.weights.transport import Update
from slime.serving.weights.version_folder import FolderWriter, new_version, version_path

BASELINE: dict[str, str] = {"base_version": "", "base_id": ""}
"""How the checkpoint that engines serve is named as a base."""


class DeltaPublisher:
    """Holds one copy of the weights, in the form of the checkpoint."""

    needs_local = True

    def __init__(
        self,
        root: Path,
        checkpoint: Path,
        stored: Mapping[str, StoredTensor],
        *,
        shard_size: int,
        encoding: Encoding,
        checksum: str,
    ) -> None:
        """
        Args:
            checkpoint: folder that the engines serve; `stored` is its layout.
            shard_size: bytes of a file, before the last tensor in it.

        Raises:
            ConfigError: the checksum's package is not installed.
        """
        self._root, self._checkpoint, self._stored = root, checkpoint, stored
        self._shard_size = shard_size
        self._encoding, self._checksum_name = encoding, checksum
        self._checksum = checksum_of(checksum)
        self._tied = HEAD in stored and is_tied(HEAD, checkpoint)
        self._snapshot: dict[str, Bytes] = {}
        self._base = BASELINE

    def publish(self, update: Update) -> Path:
        """Write the version; an empty one where nothing changed."""
        if not self._snapshot:
            self._snapshot, self._base = self._baseline(), BASELINE
        snapshot, self._snapshot = self._snapshot, {}  # gone unless the version is written whole
        identity = {"version": str(update.version), "id": secrets.token_hex(8)}
        counts = _Counts()
        with new_version(self._root, update.version) as writer:
            self._write(writer, self._changes(update, snapshot, counts))
            writer.finish(
                identity
                | self._base
                | {
                    "delta_encoding": self._encoding,
                    "compression_format": "zstd",
                    "checksum_format": self._checksum_name,
                }
            )
        self._snapshot = snapshot
        self._base = {"base_version": identity["version"], "base_id": identity["id"]}
        update.metrics["perf/update_weights_density"] = counts.changed / max(1, counts.total)
        update.metrics["perf/update_weights_wire_bytes"] = float(writer.bytes)
        return version_path(self._root, update.version)

    def forget(self) -> None:
        """Engines may have come that have the checkpoint only: begin from there."""
        self._snapshot = {}

    def _write(self, writer: FolderWriter, changes: Iterator[tuple[str, bytes, str]]) -> None:
        held: dict[str, torch.Tensor] = {}
        sums: dict[str, str] = {}
        size = 0
        for name, payload, checksum in changes:
            held[name] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
            sums[name] = checksum
            size += len(payload)
            if size >= self._shard_size:
                writer.shard(held, sums)
                held, sums, size = {}, {}, 0
        if held:
            writer.shard(held, sums)

    def _changes(
        self, update: Update, snapshot: dict[str, Bytes], counts: _Counts
    ) -> Iterator[tuple[str, bytes, str]]:
        """Name, payload and checksum of the new bytes, of each tensor that changed; follows the snapshot."""
        for item in update.taken():
            new = _bytes(item)
            for name in self._names(item.name):
                old = snapshot[name]
                counts.total += len(new)
                changed = int(np.count_nonzero(old != new))
                counts.changed += changed
                if changed:
                    payload = encode(self._encoding, old, new, name)
                    old[:] = new
                    yield name, compressed(payload), self._checksum(new)

    def _names(self, name: str) -> list[str]:
        """The stored names of a weight: an output layer that is tied, and stored, changes with its
        embedding.
        """
        return [name, HEAD] if self._tied and name.endswith(EMBEDDING) else [name]

    def _baseline(self) -> dict[str, Bytes]:
        files = {entry.file for entry in self._stored.values()}
        maps: dict[str, Any] = {file: np.memmap(self._checkpoint / file, np.uint8, "r") for file in files}
        return {
            name: np.array(maps[entry.file][entry.start : entry.end]) for name, entry in self._stored.items()
        }


class _Counts:
    changed = 0
    total = 0


def _bytes(item: Outgoing) -> Bytes:
    array: Bytes = item.converted().cpu().flatten().view(torch.uint8).numpy()
    return array

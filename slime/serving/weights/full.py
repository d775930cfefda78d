"""`FullPublisher`: every version as a Hugging Face folder of its own.

Invariant: the folder has all that the engines' checkpoint has: what the trainer does not change is copied
from there. Knows files, and nothing of engines.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from pathlib import Path

from slime.serving.weights.layout import StoredTensor, is_tied, read_tensor
from slime.serving.weights.outgoing import buckets
from slime.serving.weights.transport import Update
from slime.serving.weights.version_folder import FolderWriter, new_version, version_path


class FullPublisher:
    """Writes whole folders."""

    needs_local = False

    def __init__(
        self, root: Path, checkpoint: Path, stored: Mapping[str, StoredTensor], *, shard_size: int
    ) -> None:
        """
        Args:
            checkpoint: folder that the engines serve; `stored` is its layout.
            shard_size: bytes of a file.
        """
        self._root, self._checkpoint, self._stored = root, checkpoint, stored
        self._shard_size = shard_size

    def publish(self, update: Update) -> Path:
        """Write the version."""
        sent: set[str] = set()
        with new_version(self._root, update.version) as writer:
            writer.copy_others(self._checkpoint)
            for bucket, _ in buckets(update.taken(), self._shard_size):
                writer.shard({item.name: item.converted() for item in bucket})
                sent.update(item.name for item in bucket)
            self._keep_others(writer, sent)
            writer.finish(
                {"total_size": update.sent_bytes, "version": str(update.version), "id": secrets.token_hex(8)}
            )
        return version_path(self._root, update.version)

    def _keep_others(self, writer: FolderWriter, sent: AbstractSet[str]) -> None:
        """Tensors that are no parameters; a tied output layer is the embedding, which was sent."""
        rest = [name for name in self._stored if name not in sent and not is_tied(name, self._checkpoint)]
        if rest:
            writer.shard({name: read_tensor(self._checkpoint, name, self._stored[name]) for name in rest})

    def forget(self) -> None:
        """Each version is whole."""

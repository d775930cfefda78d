"""Weights through files: a published version, which engines load, or pull into a folder of their machine.

Invariant: files are written while engines still generate; only loading falls into the pause. A version's
files are removed when all engines have answered, unless they are to be kept. Knows publishers by their
protocol.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Protocol, TypeAlias

from slime.serving.endpoint import EngineEndpoint
from slime.serving.weights.client import FROM_DISK, WeightClient
from slime.serving.weights.delta.apply import pull
from slime.serving.weights.sync import WeightSource
from slime.serving.weights.transport import Update, drain
from slime.serving.weights.version_folder import remove_version

AfterWrite: TypeAlias = Callable[[Path, Sequence[EngineEndpoint]], object]
"""The user's hook: the folder of a version, and the engines that will load it."""


class Publisher(Protocol):
    """Writes versions.

    Attributes:
        needs_local: whether engines cannot load what it writes, but only a folder that took it.
    """

    needs_local: bool

    def publish(self, update: Update) -> Path:
        """Write the version."""
        ...

    def forget(self) -> None:
        """The engines are others from now on."""
        ...


class DiskTransport:
    """Engines load folders."""

    has_session = False
    takes_weights = True
    request_fields: ClassVar[Mapping[str, str]] = {}

    def __init__(
        self,
        publisher: Publisher,
        *,
        checkpoint: Path,
        local: Path | None,
        keeps_files: bool,
        after_write: AfterWrite | None = None,
    ) -> None:
        """
        Args:
            checkpoint: folder that the engines serve.
            local: folder of an engine's machine; engines that can pull do it themselves, for others the
                trainer applies deltas, and must see the same folder.
        """
        self._publisher = publisher
        self._checkpoint = checkpoint
        self._local = local
        self._keeps_files = keeps_files
        self._after_write = after_write
        self._folder = checkpoint
        self._paths: dict[str, Path] = {}

    def stage(self, update: Update) -> None:
        """Write the version, and let it be pulled.

        Raises:
            CheckpointError: a folder cannot be written. ModelError: see `pull`.
            DeadlineError: writing took all of the time; it is not the engines that are late.
        """
        folder = self._publisher.publish(update)
        endpoints = [engine.endpoint for engine in update.crew.members]
        if self._after_write is not None:
            self._after_write(folder, endpoints)
        self._folder = folder
        self._paths = {endpoint.name: folder for endpoint in endpoints}
        update.crew.deadline.check()
        if self._local is None:
            return
        body = {
            "local_checkpoint_dir": str(self._local),
            "source_dir": str(folder),
            "target_version": str(update.version),
        }

        def pull_there(engine: WeightClient) -> bool:
            return engine.able.pulls_weights and bool(engine.post("/pull_weights", body))

        pulled = update.crew.each("pull", pull_there)
        if self._publisher.needs_local and not all(pulled.values()):
            left = update.crew.deadline.left
            pull(folder, self._local, str(update.version), self._checkpoint, patience=left)
        for name, has_pulled in pulled.items():
            if has_pulled or self._publisher.needs_local:
                self._paths[name] = self._local

    def send(self, update: Update) -> None:
        """Let engines load it."""

        def load(engine: WeightClient) -> None:
            path = str(self._paths[engine.name])
            body = {"model_path": path, **update.naming(is_last=True)}
            engine.post_weights(FROM_DISK, body)

        update.crew.each("weights", load)
        if not self._keeps_files:
            remove_version(self._folder)

    def follow(self, source: WeightSource, version: int) -> None:
        """Go through the weights."""
        drain(source.weights())

    def forget(self) -> None:
        """Deltas begin anew."""
        self._publisher.forget()

    def close(self) -> None:
        """Nothing is held."""

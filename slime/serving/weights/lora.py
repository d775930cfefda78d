"""Adapters alone, as files: engines that serve the base load them under one name, which requests then give.

Invariant: the name is the same for every version, and an engine has one version of it. Requests that run hold
their adapter, so that they are ended before it is replaced. Knows folders and HTTP; knows no adapters.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Protocol, runtime_checkable

from slime.config.weight_movement import ADAPTER
from slime.errors import ConfigError, EngineRequestError
from slime.serving.weights.client import WeightClient
from slime.serving.weights.disk import AfterWrite
from slime.serving.weights.sync import WeightSource
from slime.serving.weights.transport import Update
from slime.serving.weights.version_folder import remove_version, version_path

_FLAG = "--update-weight-transport lora"


@runtime_checkable
class AdapterSource(WeightSource, Protocol):
    """A trainer of adapters."""

    def save_adapter(self, folder: Path) -> None:
        """Write the adapters alone, as peft reads them; a collective call of all ranks."""
        ...


class LoraTransport:
    """Writes adapters and lets engines load them."""

    has_session = False
    takes_weights = False
    request_fields: ClassVar[Mapping[str, str]] = {"lora_path": ADAPTER}

    def __init__(
        self, source: WeightSource, root: Path, *, keeps_files: bool, after_write: AfterWrite | None
    ) -> None:
        """
        Raises:
            ConfigError: the trainer has no adapters.
        """
        if not isinstance(source, AdapterSource):
            raise ConfigError(
                "lora moves adapters, and this trainer has none",
                place=_FLAG,
                remedy="train with --lora-rank, or choose another way",
            )
        self._source = source
        self._root = root
        self._keeps_files = keeps_files
        self._after_write = after_write

    def stage(self, update: Update) -> None:
        """Write the adapters.

        Raises:
            ConfigError: requests are to go on behind the update.
        """
        folder = version_path(self._root, update.version)
        self._source.save_adapter(folder)
        if update.pause != "abort":
            raise ConfigError(
                f"an adapter is not replaced under requests that go on (pause {update.pause})",
                place=_FLAG,
                remedy="use another transport: it sends the merged weights",
            )
        update.sent_bytes = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        if self._after_write is not None:
            self._after_write(folder, [engine.endpoint for engine in update.crew.members])

    def send(self, update: Update) -> None:
        """Replace the adapter, and name the version."""
        folder = version_path(self._root, update.version)

        def load(engine: WeightClient) -> None:
            engine.able.require("lora", needed_by=_FLAG, place=engine.endpoint.url)
            with contextlib.suppress(EngineRequestError):  # it has none yet; else loading is refused
                engine.post("/unload_lora_adapter", {"lora_name": ADAPTER})
            engine.post("/load_lora_adapter", {"lora_name": ADAPTER, "lora_path": str(folder)})
            body = {"new_version": str(update.version), "abort_all_requests": False}
            engine.post("/update_weight_version", body)

        update.crew.each("adapter", load)
        if not self._keeps_files:
            remove_version(folder)

    def follow(self, source: WeightSource, version: int) -> None:
        """Take part in gathering the adapters."""
        self._source.save_adapter(version_path(self._root, version))

    def forget(self) -> None:
        """Nothing is held of engines."""

    def close(self) -> None:
        """Nothing is held."""

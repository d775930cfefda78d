"""New weights for a running engine: from a folder, from safetensors in the request, from shared memory, from
a process group.

Invariant: names and shapes are checked before anything changes, and nothing is ever unpickled; what comes in
pieces is kept aside until its session ends, and then swapped in whole. Owns the mapped file, so that a later
swap of the same file costs nothing. Blocking; knows nothing of HTTP.
"""

from __future__ import annotations

import base64
import binascii
import json
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime.errors import EngineRequestError, ModelError
from slime.serving.embedded.core import EngineCore

if TYPE_CHECKING:
    import torch

    from slime.serving.weights.group import WeightGroup
    from slime.serving.weights.shared import SharedWeights

GROUP_SECONDS = 600.0
"""Deadline of meeting in a group, and of each broadcast: an engine without its trainer does not wait for
ever.
"""
FORMATS = ("shared_memory", "shared_memory_copy", "safetensors")


class WeightUpdater:
    """Weight changes of one engine, one at a time.

    Attributes:
        in_session: between `/begin_weight_update` and `/end_weight_update`.
    """

    def __init__(self, engine: EngineCore) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        self._mapped: SharedWeights | None = None
        self._groups: dict[str, WeightGroup] = {}
        self._received: dict[str, torch.Tensor] = {}
        self._naming: tuple[str | None, bool] = (None, False)
        self.in_session = False

    def begin(self) -> None:
        """Open a session."""
        self._received, self._naming = {}, (None, False)
        self.in_session = True

    def end(self) -> None:
        """Close the session, and compute with what came over process groups in it.

        Raises:
            EngineError: names or shapes do not fit, or a weight is missing: nothing was changed.
        """
        self.in_session = False
        received, self._received = self._received, {}
        if received:
            with self._lock:
                version, flush = self._naming
                self._swap(received, version, alias=True, flush=flush)

    def join_group(self, name: str, host: str, port: int, *, rank: int, size: int, backend: str) -> None:
        """Meet a trainer and its other engines.

        Raises:
            EngineRequestError: a backend other than gloo, or a group of this name is there already.
            EngineError: they did not meet.
        """
        from slime.serving.weights.group import WeightGroup, find_store

        if backend != "gloo":
            raise EngineRequestError(f"backend must be gloo on this engine, got {backend!r}.")
        if name in self._groups:
            raise EngineRequestError(f"there is a group {name!r} already; destroy it first.")
        store = find_store(host, port, GROUP_SECONDS)
        self._groups[name] = WeightGroup(
            store, rank=rank, size=size, name=name, backend=backend, timeout=GROUP_SECONDS
        )

    def leave_group(self, name: str) -> None:
        """Give a group up.

        Raises:
            EngineRequestError: there is none of this name.
        """
        self._group(name)
        self._groups.pop(name).close()

    def from_group(
        self, group: str, forms: list[tuple[str, str, list[int]]], version: str | None, *, flush: bool
    ) -> None:
        """Receive tensors (name, dtype, shape), to be computed with from the end of the session.

        Raises:
            EngineRequestError: no such group, or a dtype that torch has not.
            EngineError: the broadcast failed.
        """
        import torch

        received = {}
        for name, code, shape in forms:
            dtype = getattr(torch, code, None)
            if not isinstance(dtype, torch.dtype):
                raise EngineRequestError(f"dtypes: torch has no {code!r}.")
            received[name] = torch.empty(shape, dtype=dtype)
        self._group(group).broadcast([*received.values()], GROUP_SECONDS)
        self._received |= received
        self._naming = (version or self._naming[0], flush or self._naming[1])

    def _group(self, name: str) -> WeightGroup:
        if name not in self._groups:
            raise EngineRequestError(f"there is no group {name!r}; make it with init_weights_update_group.")
        return self._groups[name]

    def from_disk(self, folder: str, version: str | None, *, flush: bool) -> None:
        """Copy in the safetensors of a Hugging Face folder.

        Raises:
            ModelError: missing, unreadable, or of another architecture.
            EngineError: names or shapes do not fit.
        """
        with self._lock:
            tensors = dict(_read_folder(Path(folder), self._engine))
            self._swap(tensors, version, alias=False, flush=flush)

    def pull(self, source: Path, local: Path, version: str) -> None:
        """Bring a folder of this machine to a published version; deltas begin from the model that was loaded.

        Raises:
            ModelError: another version, another base, or broken bytes. CheckpointError: no space.
        """
        from slime.serving.weights.delta.apply import pull

        pull(source, local, version, Path(self._engine.model_path))

    def from_tensors(self, payload: Any, load_format: Any, version: str | None, *, flush: bool) -> None:
        """Take weights over the wire.

        Args:
            payload: a list: one path (shared_memory, whose changes are seen at once, or shared_memory_copy)
                or base64 safetensors blobs (safetensors).

        Raises:
            EngineRequestError: a format that is not supported, or a payload that is not in it.
            ModelError: a weight file that is missing or not in safetensors layout.
            EngineError: names or shapes do not fit, or a weight is missing.
        """
        if load_format not in FORMATS:
            raise EngineRequestError(
                f"load_format must be one of {', '.join(FORMATS)}; got {load_format!r}. "
                "SGLang's other formats are pickles, which this engine never reads."
            )
        if not isinstance(payload, list) or not payload or not all(isinstance(x, str) for x in payload):
            raise EngineRequestError("serialized_named_tensors must be a non-empty list of strings.")
        with self._lock:
            if load_format != "safetensors":
                self._from_shared(payload, version, alias=load_format == "shared_memory", flush=flush)
            else:
                tensors = {name: tensor for blob in payload for name, tensor in _decoded(blob).items()}
                self._swap(tensors, version, alias=False, flush=flush)

    def _from_shared(self, payload: list[str], version: str | None, *, alias: bool, flush: bool) -> None:
        if len(payload) != 1:
            raise EngineRequestError(f"shared memory takes one path, got {len(payload)}.")
        shared = self._map(Path(payload[0]))
        self._swap(shared.views, version, alias=alias, flush=flush)
        self._mapped = shared

    def _swap(
        self, tensors: Mapping[str, torch.Tensor], version: str | None, *, alias: bool, flush: bool
    ) -> None:
        name = self._engine.weight_version if version is None else version
        self._engine.update_weights(tensors.items(), name, alias=alias, flush=flush)

    def _map(self, path: Path) -> SharedWeights:
        from slime.serving.weights.shared import SharedWeights

        held = self._mapped
        if held is not None and path == held.path and path.exists():
            status = path.stat()
            if (status.st_dev, status.st_ino) == held.inode:
                return held
        return SharedWeights.open(path)


def _decoded(blob: str) -> Mapping[str, torch.Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        return load(base64.b64decode(blob, validate=True))
    except (binascii.Error, SafetensorError) as error:
        raise EngineRequestError(f"serialized_named_tensors: not base64 of safetensors: {error}") from error


def _read_folder(folder: Path, engine: EngineCore) -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors of the folder; its files are looked at before the first is read."""
    from safetensors import SafetensorError, safe_open

    if not folder.is_dir():
        raise ModelError("no such model folder", place=str(folder))
    _check_architecture(folder, engine)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelError("no .safetensors files in the folder", place=str(folder))
    for path in files:
        try:
            with safe_open(path, "pt") as file:
                yield from ((name, file.get_tensor(name)) for name in file.keys())  # noqa: SIM118
        except SafetensorError as error:
            raise ModelError(f"not a safetensors file: {error}", place=str(path)) from error


def _check_architecture(folder: Path, engine: EngineCore) -> None:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        named = config.get("architectures")
    except (OSError, ValueError, AttributeError) as error:
        raise ModelError(f"cannot read config.json: {error}", place=str(folder)) from error
    ours = engine.model_config.architectures
    if named and ours and named != ours:
        raise ModelError(f"architecture is {named}, the engine runs {ours}", place=str(folder))

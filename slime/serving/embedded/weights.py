"""New weights for a running engine: from a folder, from safetensors in the request, from shared memory.

Invariant: names and shapes are checked before anything changes, and nothing is ever unpickled. Owns the mapped
files, so that a later swap of the same file costs nothing. Blocking; knows nothing of HTTP.
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

    from slime.serving.weights.shared import SharedWeights

FORMATS = ("shared_memory", "safetensors")


class WeightUpdater:
    """Weight changes of one engine, one at a time.

    Attributes:
        in_session: between `/begin_weight_update` and `/end_weight_update`.
    """

    def __init__(self, engine: EngineCore) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        self._mapped: SharedWeights | None = None
        self.in_session = False

    def from_disk(self, folder: str, version: str | None, *, flush: bool) -> None:
        """Copy in the safetensors of a Hugging Face folder.

        Raises:
            ModelError: missing, of another architecture, or with names or shapes that do not fit.
        """
        with self._lock:
            files = _checked_files(Path(folder), self._engine)
            self._engine.update_weights(_read(files), version, alias=False, flush=flush)
            self._mapped = None

    def from_tensors(self, payload: Any, load_format: Any, version: str | None, *, flush: bool) -> None:
        """Take weights over the wire.

        Args:
            payload: a list: one path (shared_memory) or base64 safetensors blobs (safetensors).

        Raises:
            EngineRequestError: a format that is not supported, or a payload that is not in it.
            ModelError: names or shapes do not fit.
        """
        if load_format not in FORMATS:
            raise EngineRequestError(
                f"load_format must be one of {', '.join(FORMATS)}; got {load_format!r}. SGLang's other formats "
                "are pickles, which this engine never reads."
            )
        if not isinstance(payload, list) or not payload or not all(isinstance(x, str) for x in payload):
            raise EngineRequestError("serialized_named_tensors must be a non-empty list of strings.")
        with self._lock:
            if load_format == "shared_memory":
                self._from_shared(payload, version, flush=flush)
            else:
                tensors = [pair for blob in payload for pair in _decoded(blob).items()]
                self._engine.update_weights(tensors, version, alias=False, flush=flush)

    def _from_shared(self, payload: list[str], version: str | None, *, flush: bool) -> None:
        if len(payload) != 1:
            raise EngineRequestError(f"shared_memory takes one path, got {len(payload)}.")
        shared = self._map(Path(payload[0]))
        self._engine.update_weights(shared.views.items(), version, alias=True, flush=flush)
        self._mapped = shared

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


def _checked_files(folder: Path, engine: EngineCore) -> dict[Path, list[str]]:
    """The wanted names of each safetensors file of the folder."""
    if not folder.is_dir():
        raise ModelError("no such model folder", place=str(folder))
    _check_architecture(folder, engine)
    shapes = _shapes(folder)
    found = {name: shape for shapes_of_file in shapes.values() for name, shape in shapes_of_file.items()}
    expected = engine.weight_shapes
    if engine.model_config.tie_word_embeddings and "lm_head.weight" not in expected:
        found.pop("lm_head.weight", None)
    for name in [*expected, *found]:
        if name not in found or name not in expected or tuple(found[name]) != tuple(expected[name]):
            raise ModelError(
                f"weight {name} is {_said(found.get(name))} in the folder and {_said(expected.get(name))} "
                "in the engine",
                place=str(folder),
            )
    return {file: [name for name in names if name in expected] for file, names in shapes.items()}


def _said(shape: tuple[int, ...] | None) -> str:
    return "absent" if shape is None else f"of shape {list(shape)}"


def _check_architecture(folder: Path, engine: EngineCore) -> None:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        named = config.get("architectures")
    except (OSError, ValueError, AttributeError) as error:
        raise ModelError(f"cannot read config.json: {error}", place=str(folder)) from error
    ours = engine.model_config.architectures
    if named and ours and named != ours:
        raise ModelError(f"architecture is {named}, the engine runs {ours}", place=str(folder))


def _shapes(folder: Path) -> dict[Path, dict[str, tuple[int, ...]]]:
    from safetensors import SafetensorError, safe_open

    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelError("no .safetensors files in the folder", place=str(folder))
    shapes = {}
    for path in files:
        try:
            with safe_open(path, "pt") as file:
                shapes[path] = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise ModelError(f"not a safetensors file: {error}", place=str(path)) from error
    return shapes


def _read(files: Mapping[Path, list[str]]) -> Iterator[tuple[str, torch.Tensor]]:
    from safetensors import safe_open

    for path, names in files.items():
        with safe_open(path, "pt") as file:
            for name in names:
                yield name, file.get_tensor(name)

"""Samples as JSON and back: what `Sample.to_dict` gives, with arrays as base64.

Invariant: ``from_json(to_json(sample))`` restores plain values and numpy arrays; anything else is an error
that names sample and field. Never pickle.
"""

from __future__ import annotations

import base64
from typing import Any

import numpy as np

from slime.errors import CheckpointError
from slime.utils.types import Sample

_ARRAY = "__ndarray__"


def to_json(sample: Sample) -> dict[str, Any]:
    """A dict that `json.dumps` takes; tuples become lists.

    Raises:
        CheckpointError: a field holds something that JSON cannot, naming it.
    """
    return {name: _plain(value, name, sample) for name, value in sample.to_dict().items()}


def from_json(data: dict[str, Any]) -> Sample:
    """Inverse of `to_json`."""
    return Sample.from_dict({key: _restored(value) for key, value in data.items()})


def _plain(value: Any, field: str, sample: Sample) -> Any:
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, list | tuple):
        return [_plain(item, field, sample) for item in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: _plain(item, f"{field}.{key}", sample) for key, item in value.items()}
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        data = base64.b64encode(np.ascontiguousarray(value).tobytes()).decode()
        return {_ARRAY: data, "dtype": value.dtype.str, "shape": list(value.shape)}
    if isinstance(value, np.generic):
        return value.item()
    what = "a dict with keys that are not text" if isinstance(value, dict) else f"a {type(value).__name__}"
    raise CheckpointError(
        f"{field} holds {what}, which cannot be written as JSON",
        place=f"sample {sample.index}",
        remedy="keep plain values (text, numbers, lists, dicts, numpy arrays) on samples",
    )


def _restored(value: Any) -> Any:
    if isinstance(value, list):
        return [_restored(item) for item in value]
    if not isinstance(value, dict):
        return value
    if _ARRAY in value:
        flat = np.frombuffer(base64.b64decode(value[_ARRAY]), dtype=np.dtype(value["dtype"]))
        return flat.reshape(value["shape"]).copy()
    return {key: _restored(item) for key, item in value.items()}


def group_to_json(group: Any) -> list[Any]:
    """A group, flat or nested, as JSON values."""
    return [group_to_json(item) if isinstance(item, list) else to_json(item) for item in group]


def group_from_json(group: Any) -> list[Any]:
    """Inverse of `group_to_json`."""
    return [group_from_json(item) if isinstance(item, list) else from_json(item) for item in group]

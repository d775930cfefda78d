"""Routes of mixture-of-experts layers: the experts that each token went to, as engines tell and samples hold.

Invariant: row i belongs to token i as an input, so the last token of a row has none; layers without experts
have rows too, whose numbers mean nothing; -1 is a route that is not known. Torch-free.
"""

from __future__ import annotations

import base64
import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Routes: TypeAlias = npt.NDArray[np.int32]
"""[tokens - 1, layers, top_k]; flat where the model is not known."""
UNKNOWN = -1


@dataclass(frozen=True, slots=True)
class RouteShape:
    """What a model's routes look like: all its layers, and the experts that a token goes to in one."""

    layers: int
    top_k: int
    experts: int


def shape_of_config(config: Mapping[str, Any]) -> RouteShape | None:
    """The shape by a Hugging Face config; None for a model without experts."""
    text = config.get("text_config") or config
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    experts = next((text[name] for name in names if text.get(name)), None)
    if not experts or not text.get("num_experts_per_tok"):
        return None
    return RouteShape(int(text["num_hidden_layers"]), int(text["num_experts_per_tok"]), int(experts))


@functools.cache
def shape_of_folder(folder: str | None) -> RouteShape | None:
    """The shape by the ``config.json`` of a model folder; None where that tells of no experts."""
    path = Path(folder or "") / "config.json"
    if not folder or not path.is_file():
        return None
    return shape_of_config(json.loads(path.read_text(encoding="utf-8")))


def encoded_routes(routes: Routes) -> str:
    """Routes as an engine's answer holds them: base64 of int32."""
    return base64.b64encode(np.ascontiguousarray(routes, dtype=np.int32).tobytes()).decode()


def decoded_routes(routes: str | npt.NDArray[Any]) -> Routes:
    """Routes of an engine's answer: base64 of int32, flat, or an array as it is."""
    if isinstance(routes, str):
        return np.frombuffer(base64.b64decode(routes), dtype=np.int32)
    return np.asarray(routes, dtype=np.int32)


def joined_routes(held: Routes | None, new: Routes, *, start: int, tokens: int) -> Routes:
    """Routes of a row that grew: those held before token `start`, and new ones from there on.

    Args:
        held: None where `start` is 0.
        new: of tokens `start` to `tokens` - 2.
        tokens: length of the row.

    Raises:
        ValueError: the new routes are not those of so many tokens, or rows before them are missing.
    """
    count = tokens - 1 - start
    if count < 0 or (new.size % count if count else new.size):
        raise ValueError(f"routed_experts holds {new.size} numbers, which are no routes of {count} tokens")
    if start == 0 or held is None or count == 0:
        if start > 0 and (held is None or len(held) == 0):
            raise ValueError(f"routed_experts begins at token {start}, and no routes before it are held")
        return new if count or held is None else held
    before = held.reshape(-1, new.size // count)[:start]
    if len(before) < start:
        raise ValueError(f"routed_experts begins at token {start}, and routes of {len(before)} are held")
    rows = np.concatenate([before, new.reshape(count, -1)])
    return rows.reshape(-1, *held.shape[1:]) if held.ndim > 1 else rows.reshape(-1)


def route_rows(routes: Routes, tokens: int, shape: RouteShape) -> Routes:
    """Routes as [n, layers, top_k], n at most tokens - 1.

    Raises:
        ValueError: they are not of this shape, or of more tokens.
    """
    width = shape.layers * shape.top_k
    if routes.size % width or routes.size // width > max(tokens - 1, 0):
        raise ValueError(
            f"{routes.size} numbers are no routes of {tokens} tokens through {shape.layers} layers with "
            f"{shape.top_k} experts each"
        )
    return routes.reshape(-1, shape.layers, shape.top_k)


def shaped_routes(routes: Routes, tokens: int, shape: RouteShape) -> Routes:
    """Routes as [tokens - 1, layers, top_k]; rows that are missing at the end are `UNKNOWN`.

    Raises:
        ValueError: as `route_rows`.
    """
    rows = route_rows(routes, tokens, shape)
    missing = tokens - 1 - len(rows)
    if missing <= 0:
        return rows
    return np.concatenate([rows, np.full((missing, *rows.shape[1:]), UNKNOWN, np.int32)])

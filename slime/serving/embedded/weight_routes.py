"""Routes that change weights and their version.

Invariant: changes happen one at a time; a refused one answers 400 with ``success: false`` and changes
nothing. Knows nothing of where tensors come from.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from aiohttp import web

from slime.errors import EngineError, EngineRequestError, EngineUnavailableError, ModelError
from slime.serving.embedded.protocol import flag, parse_json
from slime.serving.embedded.state import STATE, ServerState, json_response

_OUTSIDE = "must run between begin_weight_update() and end_weight_update()"


async def update_from_disk(request: web.Request) -> web.Response:
    """POST /update_weights_from_disk."""
    state = request.app[STATE]
    body = parse_json(await request.read())
    path, version, flush = body.get("model_path"), _version(body), _flush(body)
    if not isinstance(path, str) or not path:
        return _refused(f"model_path must be a folder, got {path!r}.")
    if flag(body, "abort_all_requests"):
        state.engine.abort_all()
    return await _change(state, lambda: state.weights.from_disk(path, version, flush=flush), version)


async def update_from_tensor(request: web.Request) -> web.Response:
    """POST /update_weights_from_tensor."""
    state = request.app[STATE]
    body = parse_json(await request.read())
    if not state.weights.in_session:
        return _refused(f"update_weights_from_tensor {_OUTSIDE}")
    payload, load_format = body.get("serialized_named_tensors"), body.get("load_format")
    version, flush = _version(body), _flush(body)
    return await _change(
        state, lambda: state.weights.from_tensors(payload, load_format, version, flush=flush), version
    )


async def begin_update(request: web.Request) -> web.Response:
    """POST /begin_weight_update."""
    state = request.app[STATE]
    if state.weights.in_session:
        return _refused("a weight update has already begun; end it with end_weight_update()")
    state.weights.in_session = True
    return json_response({"success": True, "message": "Weight update begun."})


async def end_update(request: web.Request) -> web.Response:
    """POST /end_weight_update."""
    state = request.app[STATE]
    if not state.weights.in_session:
        return _refused("no weight update has begun; begin one with begin_weight_update()")
    state.weights.in_session = False
    return json_response({"success": True, "message": "Weight update ended."})


async def update_version(request: web.Request) -> web.Response:
    """POST /update_weight_version: a new name for the weights that are there."""
    state = request.app[STATE]
    body = parse_json(await request.read())
    version = body.get("new_version")
    if not isinstance(version, str) or not version:
        return _refused(f"new_version must be a non-empty string, got {version!r}.")
    if flag(body, "abort_all_requests"):
        state.engine.abort_all()
    await asyncio.to_thread(state.engine.set_weight_version, version)
    message = f"Weight version updated to {version}"
    return json_response({"success": True, "message": message, "new_version": version})


async def _change(state: ServerState, change: Callable[[], None], version: str | None) -> web.Response:
    try:
        await asyncio.to_thread(change)
    except EngineUnavailableError:
        raise
    except (ModelError, EngineError) as error:
        return _refused(str(error))
    message = "Succeeded to update model weights."
    if version is not None:
        message += f" Weight version updated to {version}."
    paused = state.dispatcher.num_in_flight if state.engine.is_paused else 0
    return json_response({"success": True, "message": message, "num_paused_requests": paused})


def _version(body: dict[str, Any]) -> str | None:
    version = body.get("weight_version")
    if version is not None and not isinstance(version, str):
        raise EngineRequestError(f"weight_version must be a string, got {version!r}.")
    return version


def _flush(body: dict[str, Any]) -> bool:
    return flag(body, "flush_cache") if body.get("flush_cache") is not None else True


def _refused(message: str) -> web.Response:
    answer = {"success": False, "message": message, "error": {"message": message}}
    return json_response(answer, status=400)


ROUTES = [
    web.post("/update_weights_from_disk", update_from_disk),
    web.post("/update_weights_from_tensor", update_from_tensor),
    web.post("/begin_weight_update", begin_update),
    web.post("/end_weight_update", end_update),
    web.post("/update_weight_version", update_version),
]

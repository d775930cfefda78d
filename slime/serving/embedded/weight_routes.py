"""Routes that change weights and their version.

Invariant: changes happen one at a time; a refused one answers 400 with ``success: false`` and changes
nothing. Knows nothing of where tensors come from.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from aiohttp import web

from slime.errors import CheckpointError, EngineError, EngineRequestError, EngineUnavailableError, ModelError
from slime.serving.embedded.protocol import flag, parse_json
from slime.serving.embedded.sampling import integer
from slime.serving.embedded.state import STATE, ServerState, json_response

_NUMBER = integer("a whole number, at least 1", lambda x: x >= 1)
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


async def update_from_distributed(request: web.Request) -> web.Response:
    """POST /update_weights_from_distributed: computed with from the end of the session."""
    state = request.app[STATE]
    body = parse_json(await request.read())
    if not state.weights.in_session:
        return _refused(f"update_weights_from_distributed {_OUTSIDE}")
    group, forms = _text(body, "group_name"), _forms(body)
    version, flush = _version(body), _flush(body)
    return await _change(state, lambda: state.weights.from_group(group, forms, version, flush=flush), version)


async def init_group(request: web.Request) -> web.Response:
    """POST /init_weights_update_group."""
    weights = request.app[STATE].weights
    body = parse_json(await request.read())
    name, host, backend = (_text(body, key) for key in ("group_name", "master_address", "backend"))
    port, rank, size = (
        _NUMBER(key, body.get(key), 0) for key in ("master_port", "rank_offset", "world_size")
    )
    return await _answer(
        lambda: weights.join_group(name, host, port, rank=rank, size=size, backend=backend),
        "Succeeded to initialize custom process group.",
    )


async def destroy_group(request: web.Request) -> web.Response:
    """POST /destroy_weights_update_group."""
    weights = request.app[STATE].weights
    name = _text(parse_json(await request.read()), "group_name")
    return await _answer(lambda: weights.leave_group(name), "Succeeded to destroy custom process group.")


async def pull_weights(request: web.Request) -> web.Response:
    """POST /pull_weights: a folder of this machine takes a published version; nothing is loaded."""
    weights = request.app[STATE].weights
    body = parse_json(await request.read())
    source, local = Path(_text(body, "source_dir")), Path(_text(body, "local_checkpoint_dir"))
    version = _text(body, "target_version")
    return await _answer(
        lambda: weights.pull(source, local, version), f"Pulled weights of version {version}."
    )


async def begin_update(request: web.Request) -> web.Response:
    """POST /begin_weight_update."""
    state = request.app[STATE]
    if state.weights.in_session:
        return _refused("a weight update has already begun; end it with end_weight_update()")
    state.weights.begin()
    return json_response({"success": True, "message": "Weight update begun."})


async def end_update(request: web.Request) -> web.Response:
    """POST /end_weight_update."""
    state = request.app[STATE]
    if not state.weights.in_session:
        return _refused("no weight update has begun; begin one with begin_weight_update()")
    return await _answer(state.weights.end, "Weight update ended.")


async def update_version(request: web.Request) -> web.Response:
    """POST /update_weight_version: a new name for the weights that are there; as in SGLang what runs ends."""
    state = request.app[STATE]
    body = parse_json(await request.read())
    version = body.get("new_version")
    if not isinstance(version, str) or not version:
        return _refused(f"new_version must be a non-empty string, got {version!r}.")
    if body.get("abort_all_requests") is None or flag(body, "abort_all_requests"):
        state.engine.abort_all()
    await asyncio.to_thread(state.engine.set_weight_version, version)
    message = f"Weight version updated to {version}"
    return json_response({"success": True, "message": message, "new_version": version})


async def _change(state: ServerState, change: Callable[[], None], version: str | None) -> web.Response:
    message = "Succeeded to update model weights."
    if version is not None:
        message += f" Weight version updated to {version}."
    paused = state.dispatcher.num_in_flight if state.engine.is_paused else 0
    return await _answer(change, message, num_paused_requests=paused)


async def _answer(action: Callable[[], None], message: str, **more: object) -> web.Response:
    """Run a blocking action; its failure is a refusal, unless the engine is gone."""
    try:
        await asyncio.to_thread(action)
    except EngineUnavailableError:
        raise
    except (ModelError, CheckpointError, EngineError) as error:
        return _refused(str(error))
    return json_response({"success": True, "message": message, **more})


def _forms(body: dict[str, Any]) -> list[tuple[str, str, list[int]]]:
    """Name, dtype and shape of each tensor that comes."""
    columns = [body.get(key) for key in ("names", "dtypes", "shapes")]
    if not all(isinstance(column, list) for column in columns):
        raise EngineRequestError("names, dtypes and shapes must be lists.")
    names, dtypes, shapes = (column or [] for column in columns)
    if not names or not len(names) == len(dtypes) == len(shapes):
        raise EngineRequestError("names, dtypes and shapes must be lists of the same length, not empty.")
    if not all(isinstance(word, str) for word in (*names, *dtypes)):
        raise EngineRequestError("names and dtypes must hold strings.")
    if not all(isinstance(shape, list) and all(type(n) is int and n >= 0 for n in shape) for shape in shapes):
        raise EngineRequestError("shapes must hold lists of whole numbers, at least 0.")
    return [*zip(names, dtypes, shapes, strict=True)]


def _text(body: dict[str, Any], key: str) -> str:
    value = body.get(key)
    if not isinstance(value, str) or not value:
        raise EngineRequestError(f"{key} must be a non-empty string, got {value!r}.")
    return value


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
    web.post("/update_weights_from_distributed", update_from_distributed),
    web.post("/init_weights_update_group", init_group),
    web.post("/destroy_weights_update_group", destroy_group),
    web.post("/pull_weights", pull_weights),
    web.post("/begin_weight_update", begin_update),
    web.post("/end_weight_update", end_update),
    web.post("/update_weight_version", update_version),
]

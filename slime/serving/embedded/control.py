"""Routes that steer a running engine: abort, pause, continue, cache and memory.

Invariant: an answer is sent when the change took effect. Knows nothing of weights or generation.
"""

from __future__ import annotations

import asyncio
from typing import Any, cast, get_args

from aiohttp import web

from slime.errors import EngineRequestError
from slime.serving.embedded.core import PauseMode
from slime.serving.embedded.protocol import flag, parse_json
from slime.serving.embedded.state import STATE, json_response

_FLUSHED = "Cache flushed.\n"
_NOT_FLUSHED = "Flush cache failed.\n"


async def abort_request(request: web.Request) -> web.Response:
    """POST /abort_request: one rid, a list of them, or all."""
    state = request.app[STATE]
    body = parse_json(await request.read())
    if flag(body, "abort_all"):
        state.engine.abort_all()
        return web.Response()
    for rid in _rids(body.get("rid")):
        state.dispatcher.abort(rid)
    return web.Response()


def _rids(rid: Any) -> list[str]:
    rids = rid if isinstance(rid, list) else [rid]
    if not rids or not all(isinstance(item, str) and item for item in rids):
        raise EngineRequestError(
            f"rid must be a non-empty string or a list of them, got {rid!r}; or abort_all."
        )
    return rids


async def pause_generation(request: web.Request) -> web.Response:
    """POST /pause_generation: mode abort (default), in_place or retract."""
    mode = parse_json(await request.read()).get("mode", "abort")
    if mode not in get_args(PauseMode):
        raise EngineRequestError(f"mode must be one of {', '.join(get_args(PauseMode))}; got {mode!r}.")
    await asyncio.to_thread(request.app[STATE].engine.pause, cast(PauseMode, mode))
    return json_response({"message": "Generation paused successfully.", "status": "ok"})


async def continue_generation(request: web.Request) -> web.Response:
    """POST /continue_generation."""
    await asyncio.to_thread(request.app[STATE].engine.resume)
    return json_response({"message": "Generation continued successfully.", "status": "ok"})


async def flush_cache(request: web.Request) -> web.Response:
    """GET and POST /flush_cache: refused while requests hold cache."""
    flushed = await asyncio.to_thread(request.app[STATE].engine.flush_cache)
    return web.Response(text=_FLUSHED if flushed else _NOT_FLUSHED, status=200 if flushed else 400)


async def release_memory(request: web.Request) -> web.Response:
    """POST /release_memory_occupation. Weights stay: on one machine they are the trainer's own memory."""
    if await _wants_cache(request):
        await asyncio.to_thread(request.app[STATE].engine.release_memory)
    return json_response(None)


async def resume_memory(request: web.Request) -> web.Response:
    """POST /resume_memory_occupation."""
    if await _wants_cache(request):
        await asyncio.to_thread(request.app[STATE].engine.resume_memory)
    return json_response(None)


async def _wants_cache(request: web.Request) -> bool:
    body = await request.read()
    tags = parse_json(body).get("tags") if body else None
    if tags is None:
        return True
    known = ("kv_cache", "weights", "cuda_graph")
    if not isinstance(tags, list) or any(tag not in known for tag in tags):
        raise EngineRequestError(f"tags must be a list out of {', '.join(known)}; got {tags!r}.")
    return "kv_cache" in tags


ROUTES = [
    web.post("/abort_request", abort_request),
    web.post("/pause_generation", pause_generation),
    web.post("/continue_generation", continue_generation),
    web.get("/flush_cache", flush_cache),
    web.post("/flush_cache", flush_cache),
    web.post("/release_memory_occupation", release_memory),
    web.post("/resume_memory_occupation", resume_memory),
]

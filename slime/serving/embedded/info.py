"""Routes that tell how the engine is and what it serves: health, model, server, loads.

Invariant: `/health` answers from the worker's state alone, so a paused or busy engine is healthy; only
`/health_generate` really generates.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
import uuid
from datetime import UTC, datetime
from typing import Any

from aiohttp import web

from slime import __version__
from slime.serving.embedded.core import HEALTH_RID
from slime.serving.embedded.request import Request, SamplingParams
from slime.serving.embedded.state import STATE, ServerState, json_response


async def health(request: web.Request) -> web.Response:
    """GET /health, /ready, /ping: 503 when the worker is not alive."""
    return web.Response(status=200 if request.app[STATE].engine.is_alive else 503)


async def health_generate(request: web.Request) -> web.Response:
    """GET /health_generate: 200 when a token was generated within the time limit, for us or for another."""
    state = request.app[STATE]
    if not state.engine.is_alive:
        return web.Response(status=503)
    before = state.engine.stats.decode_tokens
    probe = Request(
        rid=f"{HEALTH_RID}_{uuid.uuid4().hex}",
        input_ids=[0],
        params=SamplingParams(max_new_tokens=1, temperature=0.0),
        want_text=False,
    )
    try:
        await asyncio.wait_for(state.dispatcher.run([probe]), state.health_timeout)
    except TimeoutError:
        return web.Response(status=200 if state.engine.stats.decode_tokens > before else 503)
    return web.Response()


async def model_info(request: web.Request) -> web.Response:
    """GET /model_info, /get_model_info."""
    state = request.app[STATE]
    return json_response(
        _served(state)
        | {
            "is_generation": True,
            "preferred_sampling_params": None,
            "reasoning_parser": None,
            "tool_call_parser": None,
            "disaggregation_mode": "null",
            "has_image_understanding": state.engine.takes_images,
            "has_audio_understanding": False,
            "model_type": state.engine.model_config.model_type,
            "architectures": state.engine.model_config.architectures,
        }
    )


async def server_info(request: web.Request) -> web.Response:
    """GET /server_info, /get_server_info: SGLang's names for what this engine has."""
    state = request.app[STATE]
    stats = state.engine.stats
    return json_response(
        dataclasses.asdict(state.config)
        | _served(state)
        | {
            "tokenizer_mode": "auto",
            "skip_tokenizer_init": False,
            "trust_remote_code": False,
            "context_length": state.engine.context_length,
            "is_embedding": False,
            "quantization": None,
            "kv_cache_dtype": "auto",
            "enable_return_routed_experts": state.engine.tells_routes,
            "schedule_policy": "fcfs",
            "disable_radix_cache": False,
            "tp_size": 1,
            "dp_size": 1,
            "max_total_num_tokens": stats.capacity,
            "status": "ready" if state.engine.is_alive else "dead",
            "engine": "slime-embedded",
            "version": __version__,
            "internal_states": [_internal_state(state)],
        }
    )


def _served(state: ServerState) -> dict[str, Any]:
    path = state.engine.model_path
    return {
        "model_path": path,
        "served_model_name": state.model_name,
        "tokenizer_path": path,
        "weight_version": state.engine.weight_version,
        "load_format": "auto",
    }


def _internal_state(state: ServerState) -> dict[str, Any]:
    stats = state.engine.stats
    return {
        "is_paused": state.engine.is_paused,
        "weight_version": state.engine.weight_version,
        "effective_max_running_requests_per_dp": state.config.max_running_requests,
        "num_running_reqs": stats.running,
        "num_waiting_reqs": stats.waiting,
        "num_used_tokens": stats.used_tokens,
        "num_reusable_tokens": stats.reusable_tokens,
        "total_prefill_tokens": stats.prefill_tokens,
        "total_cached_tokens": stats.cached_tokens,
        "total_decode_tokens": stats.decode_tokens,
        "total_busy_seconds": stats.busy_seconds,
    }


async def models(request: web.Request) -> web.Response:
    """GET /v1/models."""
    state = request.app[STATE]
    name = state.model_name
    card = {
        "id": name,
        "object": "model",
        "created": int(state.started_at),
        "owned_by": "slime",
        "root": name,
        "parent": None,
        "max_model_len": state.engine.context_length,
    }
    return json_response({"object": "list", "data": [card]})


async def loads(request: web.Request) -> web.Response:
    """GET /v1/loads."""
    return json_response(
        {
            "timestamp": datetime.now(UTC).isoformat(),
            "version": __version__,
            "accelerator": None,
            "num_accelerators": 1,
            "loads": [_load(request.app[STATE])],
        }
    )


def _load(state: ServerState) -> dict[str, Any]:
    stats, most = state.engine.stats, state.config.max_running_requests
    prompt = stats.cached_tokens + stats.prefill_tokens
    return {
        "timestamp": time.time(),
        "dp_rank": 0,
        "num_running_reqs": stats.running,
        "num_waiting_reqs": stats.waiting,
        "num_used_tokens": stats.used_tokens,
        "num_total_tokens": stats.used_tokens + stats.reusable_tokens,
        "max_total_num_tokens": stats.capacity,
        "max_running_requests": most,
        "token_usage": stats.used_tokens / stats.capacity,
        "gen_throughput": stats.decode_tokens / stats.busy_seconds if stats.busy_seconds else 0.0,
        "cache_hit_rate": stats.cached_tokens / prompt if prompt else 0.0,
        "utilization": stats.running / most,
    }


ROUTES = [
    web.get("/health", health),
    web.get("/ready", health),
    web.get("/ping", health),
    web.get("/health_generate", health_generate),
    web.get("/model_info", model_info),
    web.get("/get_model_info", model_info),
    web.get("/server_info", server_info),
    web.get("/get_server_info", server_info),
    web.get("/v1/models", models),
    web.get("/v1/loads", loads),
]

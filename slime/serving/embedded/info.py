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
from slime.serving.embedded.core import EngineCore
from slime.serving.embedded.request import Request, SamplingParams
from slime.serving.embedded.state import STATE, ServerState, json_response


def served_name(engine: EngineCore) -> str:
    """The model's name in answers."""
    return engine.config.served_model_name or engine.model_path


async def health(request: web.Request) -> web.Response:
    """GET /health, /ready, /ping: 503 when the worker is not alive."""
    return web.Response(status=200 if request.app[STATE].engine.is_alive else 503)


async def health_generate(request: web.Request) -> web.Response:
    """GET /health_generate: 200 when a token was generated within the time limit, for us or for another."""
    state = request.app[STATE]
    if not state.engine.is_alive:
        return web.Response(status=503)
    before = state.engine.stats.total_output_tokens
    probe = Request(
        rid=f"HEALTH_CHECK_{uuid.uuid4().hex}",
        input_ids=[0],
        params=SamplingParams(max_new_tokens=1, temperature=0.0),
        want_text=False,
    )
    try:
        await asyncio.wait_for(state.dispatcher.run([probe]), state.health_timeout)
    except TimeoutError:
        return web.Response(status=200 if state.engine.stats.total_output_tokens > before else 503)
    return web.Response()


async def model_info(request: web.Request) -> web.Response:
    """GET /model_info, /get_model_info."""
    engine = request.app[STATE].engine
    return json_response(
        {
            "model_path": engine.model_path,
            "served_model_name": served_name(engine),
            "tokenizer_path": engine.model_path,
            "is_generation": True,
            "preferred_sampling_params": None,
            "weight_version": engine.weight_version,
            "load_format": "auto",
            "reasoning_parser": None,
            "tool_call_parser": None,
            "disaggregation_mode": "null",
            "has_image_understanding": False,
            "has_audio_understanding": False,
            "model_type": engine.model_config.model_type,
            "architectures": engine.model_config.architectures,
        }
    )


async def server_info(request: web.Request) -> web.Response:
    """GET /server_info, /get_server_info: SGLang's names for what this engine has."""
    engine = request.app[STATE].engine
    stats = engine.stats
    return json_response(
        {
            **dataclasses.asdict(engine.config),
            "model_path": engine.model_path,
            "tokenizer_path": engine.model_path,
            "tokenizer_mode": "auto",
            "skip_tokenizer_init": False,
            "load_format": "auto",
            "trust_remote_code": False,
            "served_model_name": served_name(engine),
            "context_length": engine.context_length,
            "is_embedding": False,
            "quantization": None,
            "kv_cache_dtype": "auto",
            "schedule_policy": "fcfs",
            "disable_radix_cache": False,
            "tp_size": 1,
            "dp_size": 1,
            "weight_version": engine.weight_version,
            "max_total_num_tokens": stats.max_total_num_tokens,
            "status": "ready" if engine.is_alive else "dead",
            "engine": "slime-embedded",
            "version": __version__,
            "internal_states": [dataclasses.asdict(stats) | {"is_paused": engine.is_paused}],
        }
    )


async def models(request: web.Request) -> web.Response:
    """GET /v1/models."""
    state = request.app[STATE]
    name = served_name(state.engine)
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
    stats = state.engine.stats
    prompt = stats.total_prompt_tokens
    return {
        "timestamp": time.time(),
        "dp_rank": 0,
        "num_running_reqs": stats.num_running_reqs,
        "num_waiting_reqs": stats.num_waiting_reqs,
        "num_used_tokens": stats.num_used_tokens,
        "num_total_tokens": stats.num_used_tokens,
        "max_total_num_tokens": stats.max_total_num_tokens,
        "max_running_requests": state.engine.config.max_running_requests,
        "token_usage": stats.num_used_tokens / max(stats.max_total_num_tokens, 1),
        "gen_throughput": stats.gen_throughput,
        "cache_hit_rate": stats.total_cached_tokens / prompt if prompt else 0.0,
        "utilization": stats.num_running_reqs / state.engine.config.max_running_requests,
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

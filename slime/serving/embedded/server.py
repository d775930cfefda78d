"""The HTTP face of an engine: SGLang's native routes on aiohttp, for any `EngineCore`.

Invariant: the server never dies of a request; each failure is a status and an error object. A client that
goes away aborts its request. Here: the app, its errors, and `/generate`; other routes have own modules.
"""

from __future__ import annotations

import logging
import time
from contextlib import aclosing
from typing import Any

from aiohttp import web

from slime.config.sections import EngineConfig
from slime.errors import EngineError, EngineUnavailableError
from slime.serving.embedded import chat, control, info, weight_routes
from slime.serving.embedded.core import EngineCore
from slime.serving.embedded.dispatch import RequestFailedError
from slime.serving.embedded.protocol import GenerateCall, parse_generate, parse_json
from slime.serving.embedded.request import Update
from slime.serving.embedded.responses import (
    TokenText,
    error_body,
    generate_answer,
    no_text,
)
from slime.serving.embedded.state import STATE, EventStream, Handler, ServerState, json_response

_MAX_BODY = 8 << 30
_logger = logging.getLogger(__name__)


def build_app(engine: EngineCore, config: EngineConfig, *, health_timeout: float) -> web.Application:
    """The aiohttp application around an engine.

    Args:
        health_timeout: seconds that `/health_generate` waits for its token.
    """
    app = web.Application(middlewares=[_errors_become_answers], client_max_size=_MAX_BODY)
    app[STATE] = ServerState(engine, config, health_timeout=health_timeout)
    app.router.add_post("/generate", generate)
    for module in (chat, control, info, weight_routes):
        app.add_routes(module.ROUTES)
    return app


class EngineServer:
    """A running server on a socket. Create and use it inside one event loop."""

    def __init__(self, engine: EngineCore, config: EngineConfig, *, health_timeout: float = 20.0) -> None:
        self._runner = web.AppRunner(
            build_app(engine, config, health_timeout=health_timeout),
            handler_cancellation=True,
            access_log=None,
            shutdown_timeout=0.5,
        )

    async def start(self, sock: Any) -> None:
        """Listen on a bound socket."""
        await self._runner.setup()
        await web.SockSite(self._runner, sock, backlog=1024).start()

    async def stop(self) -> None:
        """Close the socket; handlers still at work after half a second are cancelled."""
        await self._runner.cleanup()

    def drop_connections(self) -> None:
        """Reset every connection without an answer, as a killed process would."""
        server = self._runner.server
        for connection in list(server.connections) if server else []:
            if connection.transport is not None:
                connection.transport.abort()


async def generate(request: web.Request) -> web.StreamResponse:
    """POST /generate."""
    state = request.app[STATE]
    started = time.perf_counter()
    call = parse_generate(parse_json(await request.read()), state.engine)
    if call.stream:
        return await _stream(request, state, call, started)
    updates = await state.dispatcher.run(call.requests, call.rid)
    answers = [_answer(state, call, index, update, started) for index, update in enumerate(updates)]
    return json_response(answers if call.is_list else answers[0])


async def _stream(
    request: web.Request, state: ServerState, call: GenerateCall, started: float
) -> web.StreamResponse:
    stream = EventStream(request)
    async with aclosing(state.dispatcher.updates(call.requests, call.rid)) as updates:
        try:
            async for index, update in updates:
                answer = _answer(state, call, index, update, started)
                await stream.send(answer | {"index": index} if call.is_list else answer)
        except RequestFailedError as error:
            await stream.fail(error)
    return await stream.finish()


def _answer(
    state: ServerState, call: GenerateCall, index: int, update: Update, started: float
) -> dict[str, Any]:
    token_text: TokenText = state.token_text if call.text_in_logprobs else no_text
    latency = time.perf_counter() - started
    return generate_answer(call.requests[index], update, latency=latency, token_text=token_text)


@web.middleware
async def _errors_become_answers(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except EngineUnavailableError as error:
        return json_response(error_body(str(error)), status=503)
    except EngineError as error:
        return json_response(error_body(str(error)), status=400)
    except RequestFailedError as error:
        return json_response(error_body(str(error)), status=error.status)
    except web.HTTPException as error:
        return json_response({"detail": error.reason}, status=error.status)
    except ConnectionResetError:  # the client is gone: nobody to answer
        if request.transport is not None:
            request.transport.abort()
        return web.Response()
    except Exception as error:  # the request handler boundary: the server outlives any request
        _logger.exception("%s %s failed", request.method, request.path)
        return json_response(error_body(f"{type(error).__name__}: {error}"), status=500)

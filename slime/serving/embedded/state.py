"""What all HTTP handlers share: the engine, its dispatcher, the weight session, and how JSON is answered.

Invariant: blocking engine calls run on threads, never on the event loop. Knows no route.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

import orjson
from aiohttp import web

from slime.config.sections import EngineConfig
from slime.serving.embedded.core import EngineCore
from slime.serving.embedded.dispatch import Dispatcher, RequestFailedError
from slime.serving.embedded.responses import error_body
from slime.serving.embedded.weights import WeightUpdater

Handler: TypeAlias = Callable[[web.Request], Awaitable[web.StreamResponse]]


class ServerState:
    """One engine and what the server remembers about it.

    Attributes:
        started_at: seconds since the epoch.
        health_timeout: seconds that `/health_generate` waits for its token.
    """

    def __init__(self, engine: EngineCore, config: EngineConfig, *, health_timeout: float) -> None:
        self.engine = engine
        self.config = config
        self.dispatcher = Dispatcher(engine)
        self.weights = WeightUpdater(engine)
        self.started_at = time.time()
        self.health_timeout = health_timeout

    @property
    def model_name(self) -> str:
        """The model's name in answers."""
        return self.config.served_model_name or self.engine.model_path

    def token_text(self, token: int) -> str:
        """The text of one token by itself."""
        return str(self.engine.tokenizer.decode([token]))


STATE: web.AppKey[ServerState] = web.AppKey("state", ServerState)


def json_response(value: Any, status: int = 200) -> web.Response:
    """An `application/json` answer."""
    return web.Response(body=orjson.dumps(value), status=status, content_type="application/json")


class EventStream:
    """Server-sent events as the answer to one request. The answer begins with the first event.

    A failure before it is an ordinary error answer with its status; a later one is an event.
    """

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self._response: web.StreamResponse | None = None

    async def send(self, value: Any) -> None:
        """Send one event."""
        await (await self._opened()).write(b"data: " + orjson.dumps(value) + b"\n\n")

    async def fail(self, error: RequestFailedError) -> None:
        """Tell that generation failed."""
        if self._response is None:
            raise error
        await self.send(error_body(str(error)))

    async def finish(self) -> web.StreamResponse:
        """Send SGLang's end mark."""
        response = await self._opened()
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _opened(self) -> web.StreamResponse:
        if self._response is None:
            headers = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
            self._response = web.StreamResponse(headers=headers)
            await self._response.prepare(self._request)
        return self._response

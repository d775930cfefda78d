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
from slime.errors import EngineUnavailableError
from slime.serving.embedded.core import HEALTH_RID, EngineCore
from slime.serving.embedded.dispatch import Dispatcher
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

    @property
    def is_alive(self) -> bool:
        """Whether the worker runs: one that does takes an abort, also of a name that nobody uses."""
        try:
            self.engine.abort(HEALTH_RID)
        except EngineUnavailableError:
            return False
        return True

    def token_text(self, token: int) -> str:
        """The text of one token by itself."""
        return str(self.engine.tokenizer.decode([token]))


STATE: web.AppKey[ServerState] = web.AppKey("state", ServerState)


def json_response(value: Any, status: int = 200) -> web.Response:
    """An `application/json` answer."""
    return web.Response(body=orjson.dumps(value), status=status, content_type="application/json")


async def open_stream(request: web.Request) -> web.StreamResponse:
    """Start a server-sent event stream."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
    response.headers["Cache-Control"] = "no-cache"
    await response.prepare(request)
    return response

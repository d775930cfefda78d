"""Whatever fails in a request becomes an answer in its protocol's shape, and is counted.

Invariant: the server outlives any request. Knows no session.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeAlias

from aiohttp import web
from aiohttp.typedefs import Middleware

from slime.agent.adapters.http import cut_off, error_of_http, json_response
from slime.agent.adapters.wire import AdapterError, WireProtocol

Handler: TypeAlias = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Guard:
    """Stands around all handlers.

    Args:
        protocols: the protocol of each path; the first is also the shape of errors elsewhere.
        prefix: how lines of the log begin.

    Attributes:
        counters: errors by kind, broken connections, and what others count.
    """

    def __init__(self, protocols: Mapping[str, WireProtocol], logger: logging.Logger, prefix: str) -> None:
        self.counters: dict[str, int] = {}
        self._protocols = protocols
        self._logger = logger
        self._prefix = prefix

    def middleware(self) -> Middleware:
        """For `web.Application`."""

        @web.middleware
        async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
            return await self._guarded(request, handler)

        return guard

    def count(self, name: str) -> None:
        """Count one more of something."""
        self.counters[name] = self.counters.get(name, 0) + 1

    def count_error(self, error: AdapterError) -> None:
        """Count a refusal and log it."""
        self._logger.warning("%s: %s: %s", self._prefix, error.kind, error)
        self.count(f"error_{error.kind}")

    async def _guarded(self, http: web.Request, handler: Handler) -> web.StreamResponse:
        """The handler's answer; whatever fails becomes an answer too."""
        try:
            return await handler(http)
        except AdapterError as error:
            return self._refusal(http, error)
        except web.HTTPException as error:
            return self._refusal(http, error_of_http(error))
        except ConnectionResetError:
            self.count("broken")
            return cut_off(http)
        except Exception as error:  # the request handler boundary: the server outlives any request
            self._logger.exception("%s: %s %s failed", self._prefix, http.method, http.path)
            told = f"{type(error).__name__} in the adapter; its log says more"
            return self._refusal(http, AdapterError("upstream", told))

    def _refusal(self, http: web.Request, error: AdapterError) -> web.StreamResponse:
        self.count_error(error)
        path = "/" + http.path.split("/", 3)[-1] if http.path.startswith("/s/") else http.path
        protocol = self._protocols.get(path, next(iter(self._protocols.values())))
        status, body = protocol.error(error)
        response = json_response(body, status)
        if error.retry_after is not None:
            response.headers["Retry-After"] = f"{error.retry_after:g}"
        return response

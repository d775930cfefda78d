"""What the adapters need of HTTP: bodies, session names, answers.

Knows no protocol.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import orjson
from aiohttp import web

from slime.agent.adapters.wire import AdapterError

BODY_BYTES = 64 * 2**20
BODY_SECONDS = 60.0
WRITE_SECONDS = 120.0
"""A client that takes nothing for so long is gone."""


class Connection:
    """The HTTP side of one answer: opened at the first bytes, closed once."""

    def __init__(self, http: web.Request, *, stream: bool) -> None:
        self._http = http
        self._stream = stream
        self._response: web.StreamResponse | None = None

    @property
    def is_open(self) -> bool:
        """Whether a status has been sent."""
        return self._response is not None

    async def send(self, data: bytes) -> None:
        """Send a part of a stream.

        Raises:
            ConnectionResetError: the client is gone, or takes nothing.
        """
        if not self._stream:
            return
        if self._response is None:
            headers = {"Cache-Control": "no-cache", "Connection": "keep-alive"}
            self._response = web.StreamResponse(headers=headers)
            self._response.content_type = "text/event-stream"
            await self._response.prepare(self._http)
        if data:
            await _within_deadline(self._response.write(data))

    async def finish(self, body: Callable[[], dict[str, Any]]) -> web.StreamResponse:
        """Close the stream, or answer with `body`.

        Raises:
            ConnectionResetError: the client is gone, or takes nothing.
        """
        if self._response is None:
            if self._http.transport is None or self._http.transport.is_closing():
                raise ConnectionResetError("the client is gone")
            return json_response(body())
        await _within_deadline(self._response.write_eof())
        return self._response


async def _within_deadline(writing: Awaitable[None]) -> None:
    try:
        async with asyncio.timeout(WRITE_SECONDS):
            await writing
    except TimeoutError as error:
        raise ConnectionResetError(f"the client took nothing for {WRITE_SECONDS:g} s") from error


def cut_off(http: web.Request) -> web.Response:
    """Close the connection and drop what waits to be sent; the answer that is returned goes nowhere."""
    if http.transport is not None:
        http.transport.abort()
    return web.Response()


async def read_body(http: web.Request) -> dict[str, Any]:
    """The JSON object of a request.

    Raises:
        AdapterError: too large, too slow, no JSON, or no object.
    """
    try:
        async with asyncio.timeout(BODY_SECONDS):
            raw = await http.read()
    except TimeoutError as error:
        raise AdapterError("invalid_request", f"the body did not come within {BODY_SECONDS:g} s") from error
    except web.RequestPayloadError as error:
        raise AdapterError("invalid_request", "the body is not encoded as its headers say") from error
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise AdapterError("invalid_request", f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise AdapterError("invalid_request", "the body must be a JSON object")
    return body


def named_session(http: web.Request, body: Mapping[str, Any]) -> str:
    """The session that a request names: by path, bearer, API key or body, in this order."""
    scheme, _, token = http.headers.get("Authorization", "").partition(" ")
    bearer = token.strip() if scheme.lower() == "bearer" else ""
    metadata = body.get("metadata")
    named = metadata.get("session_id") if isinstance(metadata, Mapping) else None
    names = (http.match_info.get("sid"), bearer, http.headers.get("X-Api-Key"), named, body.get("user"))
    return next((name for name in names if isinstance(name, str) and name), "")


def error_of_http(error: web.HTTPException) -> AdapterError:
    if error.status == 413:
        return AdapterError("too_large", f"the body is larger than {BODY_BYTES} bytes")
    if error.status in (404, 405):
        return AdapterError("not_found", error.reason)
    return AdapterError("invalid_request", error.reason)


def json_response(body: dict[str, Any], status: int = 200) -> web.Response:
    """A JSON answer."""
    return web.Response(body=orjson.dumps(body), status=status, content_type="application/json")

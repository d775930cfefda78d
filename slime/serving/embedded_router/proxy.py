"""Passes one request on to a worker, and its answer back as it comes.

Invariant: bodies go through byte for byte, both ways; another worker is asked only if the first one died
before it answered anything; a client that goes away ends its request at the worker. Knows nothing of JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Mapping

import aiohttp
from aiohttp import web
from multidict import CIMultiDict

from slime.config.router_section import RouterSettings
from slime.serving.embedded_router.policies import Policy
from slime.serving.embedded_router.workers import Worker, Workers
from slime.utils.engine_client import ROUTING_HEADER

_HOP_BY_HOP = frozenset(
    {"connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer", "upgrade"}
    | {"transfer-encoding", "host", "content-length", "expect"}
)
_CONNECT_SECONDS = 10.0


class _NothingAnsweredError(Exception):
    """The connection to a worker broke before its answer began."""


class Proxy:
    """Passes requests on."""

    def __init__(
        self, settings: RouterSettings, workers: Workers, policy: Policy, session: aiohttp.ClientSession
    ) -> None:
        self._settings = settings
        self._workers = workers
        self._policy = policy
        self._session = session

    async def forward(self, request: web.Request) -> web.StreamResponse:
        """The answer of a worker; 503 without any, 504 past the deadline, 502 where all tries broke."""
        body = await request.read()
        seconds = self._settings.request_timeout_secs
        deadline = asyncio.get_running_loop().time() + seconds
        try:
            return await self._first_answer(request, body, deadline)
        except TimeoutError:
            return error(504, "request_timeout", f"no answer of a worker within {seconds:g} s")

    async def _first_answer(self, request: web.Request, body: bytes, deadline: float) -> web.StreamResponse:
        key = request.headers.get(ROUTING_HEADER) or None
        dead: set[str] = set()
        cause = ""
        for _ in range(self._settings.retries + 1):
            candidates = [worker for worker in self._workers.healthy if worker.url not in dead]
            if not candidates:
                break
            worker = self._policy.choose(candidates, key)
            try:
                return await self._ask(worker, request, body, deadline)
            except _NothingAnsweredError as failure:
                cause = f"{worker.url}: {failure}"
                if await self._workers.lost_contact(worker):
                    dead.add(worker.url)
        if not cause:
            return error(503, "no_available_workers", "no worker is healthy")
        return error(502, "call_upstream_request_error", f"no worker answered; the last: {cause}")

    async def _ask(
        self, worker: Worker, request: web.Request, body: bytes, deadline: float
    ) -> web.StreamResponse:
        with _counted(worker):
            async with asyncio.timeout_at(deadline):
                answer = await self._begun(worker, request, body)
            async with answer:
                return await _passed_back(answer, request, deadline)

    async def _begun(self, worker: Worker, request: web.Request, body: bytes) -> aiohttp.ClientResponse:
        limits = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS)
        url, headers = worker.url + request.path_qs, _passed(request.headers)
        try:
            return await self._session.request(
                request.method, url, data=body, headers=headers, timeout=limits
            )
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as failure:
            raise _NothingAnsweredError(f"{type(failure).__name__}: {failure}") from failure


async def _passed_back(
    answer: aiohttp.ClientResponse, request: web.Request, deadline: float
) -> web.StreamResponse:
    response = web.StreamResponse(status=answer.status, reason=answer.reason, headers=_passed(answer.headers))
    if answer.content_length is not None:
        response.content_length = answer.content_length
    await response.prepare(request)
    try:
        async with asyncio.timeout_at(deadline):
            async for chunk in answer.content.iter_any():
                await response.write(chunk)
    except (aiohttp.ClientError, TimeoutError):
        # What is out cannot be taken back: the client must see that its answer is cut.
        if request.transport is not None:
            request.transport.abort()
        return response
    await response.write_eof()
    return response


@contextlib.contextmanager
def _counted(worker: Worker) -> Iterator[None]:
    worker.load += 1
    try:
        yield
    finally:
        worker.load -= 1


def _passed(headers: Mapping[str, str]) -> CIMultiDict[str]:
    """Headers without those that belong to one connection."""
    return CIMultiDict((name, value) for name, value in headers.items() if name.lower() not in _HOP_BY_HOP)


def error(status: int, code: str, message: str) -> web.Response:
    """An error of the router's own, in the shape of sglang-router's."""
    return web.json_response({"error": {"code": code, "message": message, "type": code}}, status=status)

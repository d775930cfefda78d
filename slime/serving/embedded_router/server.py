"""The router's routes: workers, health, and what is passed on.

Invariant: the routes and shapes are those of sglang-router, as far as they go; what steers one engine (pause,
weights, abort) is not routed, for it must reach every worker. Knows nothing of how a worker is chosen.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import aiohttp
import orjson
from aiohttp import web

from slime.config.router_section import RouterSettings
from slime.serving.embedded_router.policies import policy_named
from slime.serving.embedded_router.proxy import Proxy, error
from slime.serving.embedded_router.workers import Workers

_MAX_BODY = 8 << 30
_PASSED_TO_ONE = (
    "/health_generate",
    "/model_info",
    "/get_model_info",
    "/server_info",
    "/get_server_info",
    "/generate",
    "/v1/{rest:.*}",
)


class RouterServer:
    """A running router. Create and use it inside one event loop."""

    def __init__(self, settings: RouterSettings) -> None:
        self._settings = settings
        connector = aiohttp.TCPConnector(limit=0)
        self._session = aiohttp.ClientSession(connector=connector, trust_env=False, auto_decompress=False)
        self._workers = Workers(settings, self._session)
        self._proxy = Proxy(settings, self._workers, policy_named(settings.policy), self._session)
        self._runner = web.AppRunner(
            self._app(), handler_cancellation=True, access_log=None, shutdown_timeout=0.5
        )

    async def start(self, sock: socket.socket) -> None:
        """Listen on a bound socket."""
        self._workers.start()
        await self._runner.setup()
        await web.SockSite(self._runner, sock, backlog=1024).start()

    async def stop(self) -> None:
        """Close everything; requests that are still at work after half a second are cancelled."""
        await self._runner.cleanup()
        await self._workers.stop()
        await self._session.close()

    def _app(self) -> web.Application:
        app = web.Application(client_max_size=_MAX_BODY)
        app.add_routes(
            [
                web.get("/workers", self._list),
                web.post("/workers", self._add),
                web.get("/workers/{id}", self._one),
                web.delete("/workers/{id}", self._remove),
                web.get("/health", _fine),
                web.get("/liveness", _fine),
                web.get("/readiness", self._readiness),
                web.post("/flush_cache", self._flush_cache),
                *(web.route("*", path, self._proxy.forward) for path in _PASSED_TO_ONE),
                web.route("*", "/{rest:.*}", _not_routed),
            ]
        )
        return app

    async def _list(self, request: web.Request) -> web.Response:
        workers = [worker.as_json() for worker in self._workers.listed]
        stats = {"total_workers": len(workers), "healthy_workers": len(self._workers.healthy)}
        answer = {"workers": workers, "total": len(workers), "stats": stats, "passes_bodies": True}
        return web.json_response(answer)

    async def _add(self, request: web.Request) -> web.Response:
        body = _parsed(await request.read())
        url = body.get("url")
        if not isinstance(url, str) or not url.startswith("http://"):
            return error(400, "bad_request", f"url must be http://HOST:PORT, got {url!r}")
        if body.get("worker_type", "regular") != "regular":
            return error(
                400, "bad_request", "this router takes regular workers only; sglang-router takes others"
            )
        worker = self._workers.add(url.rstrip("/"), body.get("model_id"))
        where = f"/workers/{worker.id}"
        answer = {
            "status": "accepted",
            "worker_id": worker.id,
            "url": worker.url,
            "location": where,
            "message": "the worker is listed once it is healthy",
        }
        return web.json_response(answer, status=202, headers={"Location": where})

    async def _one(self, request: web.Request) -> web.Response:
        worker = self._workers.get(request.match_info["id"])
        return error(404, "not_found", "no such worker") if worker is None else _json(worker.as_json())

    async def _remove(self, request: web.Request) -> web.Response:
        worker_id = request.match_info["id"]
        if not self._workers.remove(worker_id):
            return error(404, "not_found", "no such worker")
        return _json({"status": "accepted", "worker_id": worker_id, "message": "removed"}, status=202)

    async def _readiness(self, request: web.Request) -> web.Response:
        healthy = len(self._workers.healthy)
        return _json({"healthy_workers": healthy}, status=200 if healthy else 503)

    async def _flush_cache(self, request: web.Request) -> web.Response:
        """At every worker; as bad as the worst of them."""
        urls = [worker.url for worker in self._workers.healthy]
        statuses = dict(zip(urls, await asyncio.gather(*map(self._flushed, urls)), strict=True))
        return _json(statuses, status=max([200, *statuses.values()]))

    async def _flushed(self, url: str) -> int:
        limits = aiohttp.ClientTimeout(total=self._settings.health_check_timeout_secs)
        try:
            async with self._session.post(url + "/flush_cache", timeout=limits) as answer:
                return answer.status
        except (aiohttp.ClientError, TimeoutError):
            return 502


async def _fine(request: web.Request) -> web.Response:
    return web.Response(text="OK")


async def _not_routed(request: web.Request) -> web.Response:
    return error(404, "not_found", f"{request.path} is not routed; ask the workers (GET /workers) themselves")


def _json(value: Any, *, status: int = 200) -> web.Response:
    return web.json_response(value, status=status)


def _parsed(body: bytes) -> dict[str, Any]:
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError:
        return {}
    return value if isinstance(value, dict) else {}

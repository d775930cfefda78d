"""Asks a running engine what it can do: see capabilities.py. All questions together have one deadline."""

from __future__ import annotations

import asyncio

import orjson

from slime.errors import DeadlineError, EngineError, EngineUnavailableError
from slime.utils.capabilities import ROUTES, Capabilities, capabilities_of
from slime.utils.http_utils import http_session

PROBE_SECONDS = 60.0


async def probe(url: str, *, timeout: float = PROBE_SECONDS) -> Capabilities:
    """What the engine at `url` can do.

    Raises:
        EngineError: it is none, or one of a version that cannot be used.
        EngineUnavailableError: it cannot be reached.
        DeadlineError: it did not answer within `timeout` seconds.
    """
    import aiohttp

    try:
        async with asyncio.timeout(timeout):
            status, content = await _ask("GET", url + "/server_info")
            statuses = {route: (await _ask("OPTIONS", url + route))[0] for route in ROUTES}
    except TimeoutError as error:
        raise DeadlineError(f"did not say what it is within {timeout:g} s", place=url) from error
    except aiohttp.ClientError as error:
        raise EngineUnavailableError(f"{type(error).__name__}: {error}", place=url) from error
    try:
        info = orjson.loads(content)
    except orjson.JSONDecodeError:
        info = None
    if status != 200 or not isinstance(info, dict):
        raise EngineError(
            f"/server_info answered {status}: {content[:200]!r}", place=url, remedy="name an engine"
        )
    return capabilities_of(info, frozenset(route for route, status in statuses.items() if status != 404), url)


async def _ask(method: str, url: str) -> tuple[int, bytes]:
    session = await http_session()
    async with session.request(method, url) as response:
        return response.status, await response.read()

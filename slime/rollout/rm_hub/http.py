"""HTTP of rewards that are asked for elsewhere: POST JSON with retries, through one shared session.

Invariant: at most 64 connections an event loop, 120 s an attempt, a bounded number of attempts, and only
where another can help; an error names URL, status and body. The caller holds the deadline of the whole.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncGenerator, Mapping
from typing import TYPE_CHECKING, Any

from slime.errors import RewardError

if TYPE_CHECKING:
    import aiohttp

ATTEMPTS = 10
CONNECTIONS = 64
TOTAL_S = 120.0
RETRY_STATUSES = frozenset({408, 429, 500, 502, 503, 504})
_BODY_CHARS = 1000


class _PassingError(Exception):
    """What another attempt may get past; the text says what it was."""


async def post_json(
    url: str,
    payload: Any,
    *,
    timeout_s: float,
    place: str,
    headers: Mapping[str, str] | None = None,
    attempts: int = ATTEMPTS,
) -> Any:
    """POST a JSON payload; the answer, parsed.

    Args:
        timeout_s: seconds for all attempts together.
        place: for whom, e.g. ``sample 5 (rollout 5)``.

    Raises:
        RewardError: no answer in time or after the last attempt, a status of 400 and above, or no JSON.
    """
    last = ""
    try:
        async with asyncio.timeout(timeout_s):
            for attempt in range(attempts):
                if attempt:
                    await asyncio.sleep(backoff_seconds(attempt - 1))
                try:
                    return await _once(url, payload, headers, place)
                except _PassingError as error:
                    last = str(error)
    except TimeoutError as error:
        after = f"; last: {last}" if last else ""
        raise RewardError(
            f"POST {url}: no answer within {timeout_s:g} s{after}", place=place, reason="timeout"
        ) from error
    raise RewardError(f"POST {url}: {last} ({attempts} tries)", place=place, reason="http")


def backoff_seconds(attempt: int) -> float:
    """1 s, doubling up to 30 s, and up to one more at random."""
    return float(min(2**attempt, 30)) + random.random()


async def _once(url: str, payload: Any, headers: Mapping[str, str] | None, place: str) -> Any:
    import aiohttp

    session = await _session()
    try:
        async with session.post(url, json=payload, headers=headers) as answer:
            text = await answer.text()
    except aiohttp.InvalidURL as error:
        raise RewardError(f"POST {url}: not a valid URL", place=place, reason="http") from error
    except (aiohttp.ClientError, TimeoutError) as error:
        raise _PassingError(f"{type(error).__name__}: {error}") from error
    said = f"status {answer.status}: {text[:_BODY_CHARS]}"
    if answer.status in RETRY_STATUSES:
        raise _PassingError(said)
    if answer.status >= 400:
        raise RewardError(f"POST {url}: {said}", place=place, reason="http")
    try:
        return json.loads(text)
    except ValueError as error:
        raise RewardError(
            f"POST {url}: answered what is not JSON: {text[:_BODY_CHARS]!r}", place=place, reason="http"
        ) from error


_Holder = tuple["aiohttp.ClientSession", AsyncGenerator["aiohttp.ClientSession", None]]
_sessions: dict[asyncio.AbstractEventLoop, _Holder] = {}


async def _session() -> aiohttp.ClientSession:
    """The session of the running loop; a suspended generator holds it, which the loop closes at its end."""
    loop = asyncio.get_running_loop()
    if loop not in _sessions:
        for closed in [other for other in _sessions if other.is_closed()]:
            del _sessions[closed]
        holder = _open_session()
        _sessions[loop] = (await anext(holder), holder)
    return _sessions[loop][0]


async def _open_session() -> AsyncGenerator[aiohttp.ClientSession, None]:
    import aiohttp

    limits = aiohttp.ClientTimeout(total=TOTAL_S)
    connector = aiohttp.TCPConnector(limit=CONNECTIONS)
    async with aiohttp.ClientSession(connector=connector, timeout=limits, trust_env=False) as session:
        yield session

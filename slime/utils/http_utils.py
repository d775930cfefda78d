"""Small JSON client for plugins and the built-in remote reward: `get` and `post`.

Invariant: only errors that a retry can help are retried (connection refused or reset, 429, 502, 503, 504),
a bounded number of times; every request has a deadline; an error names URL, status and body.
One aiohttp session an event loop, opened at the first request and closed with the loop.
"""

from __future__ import annotations

import asyncio
import json
import random
import uuid
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Any

from slime.errors import SlimeError
from slime.utils.request_scope import current_scope
from slime.utils.router_answers import worker_was_lost

if TYPE_CHECKING:
    import aiohttp

RETRY_STATUSES = frozenset({429, 502, 503, 504})
CONNECT_TIMEOUT_S = 10.0
_BODY_CHARS = 2000


class HttpError(SlimeError):
    """A request that failed for good.

    Attributes:
        status: of the last answer; None when there was none.
        body: its beginning.
    """

    status: int | None = None
    body: str = ""


async def get(url: str, *, max_retries: int = 5, timeout: float = 60.0) -> Any:
    """GET a URL; JSON is parsed, anything else is returned as text.

    Args:
        max_retries: tries after the first.
        timeout: seconds for one try.

    Raises:
        HttpError: no answer, or a status of 400 and above, after the retries.
    """
    return await _request("GET", url, None, None, max_retries, timeout)


async def post(
    url: str,
    payload: Any,
    max_retries: int = 10,
    *,
    headers: dict[str, str] | None = None,
    timeout: float = 1800.0,
) -> Any:
    """POST a JSON payload; arguments, result and errors as for `get`.

    A call of an engine's ``/generate`` belongs to the current `RequestScope`, so that it can be ended early.
    """
    scope = current_scope()
    if scope is None or not url.endswith("/generate") or not isinstance(payload, dict):
        return await _request("POST", url, payload, headers, max_retries, timeout)
    if scope.stopped:
        return scope.refuse()
    from slime.utils.engine_client import EngineClient

    engine = EngineClient(url.removesuffix("/generate"))
    payload = {"rid": uuid.uuid4().hex, **scope.fields_at(engine.url)} | payload
    prompt = payload.get("input_ids") or ()
    with scope.holding(str(payload["rid"]), engine.abort, len(prompt)) as call:
        try:
            async with asyncio.timeout(scope.timeout):
                answer = await _request("POST", url, payload, headers, max_retries, timeout)
        except TimeoutError as error:
            raise _error(f"no answer within {scope.timeout:g} s (--turn-timeout)", f"POST {url}") from error
        meta = answer.get("meta_info") or {} if isinstance(answer, dict) else {}
        reason = meta.get("finish_reason") or {}
        call.tokens, call.finish = meta.get("completion_tokens", 0), str(reason.get("type", ""))
        call.versions = (str(meta["weight_version"]),) if "weight_version" in meta else ()
    return answer


async def _request(
    method: str,
    url: str,
    payload: Any,
    headers: dict[str, str] | None,
    max_retries: int,
    timeout: float,
) -> Any:
    for attempt in range(max_retries + 1):
        try:
            return await _once(method, url, payload, headers, timeout)
        except _RetryableError as error:
            if attempt == max_retries:
                raise _final(error, method, url, attempt + 1) from error
        await asyncio.sleep(backoff_seconds(attempt))
    raise ValueError(f"max_retries is {max_retries}, must be at least 0")


def backoff_seconds(attempt: int) -> float:
    """0.25 s, doubling up to 8 s, with up to as much again at random."""
    return min(0.25 * 2.0**attempt, 8.0) * (1.0 + random.random())


class _RetryableError(Exception):
    def __init__(self, message: str, status: int | None = None, body: str = "") -> None:
        super().__init__(message)
        self.status, self.body = status, body


def _error(message: str, place: str, status: int | None = None, body: str = "") -> HttpError:
    error = HttpError(f"{message}: {body}" if body else message, place=place)
    error.status, error.body = status, body
    return error


def _final(error: _RetryableError, method: str, url: str, tries: int) -> HttpError:
    return _error(f"{error} ({tries} tries)", f"{method} {url}", error.status, error.body)


async def _once(method: str, url: str, payload: Any, headers: dict[str, str] | None, timeout: float) -> Any:
    import aiohttp

    session = await http_session()
    limits = aiohttp.ClientTimeout(total=timeout, sock_connect=min(timeout, CONNECT_TIMEOUT_S))
    place = f"{method} {url}"
    try:
        async with session.request(method, url, json=payload, headers=headers, timeout=limits) as answer:
            text = await answer.text()
    except TimeoutError as error:
        raise _error(f"no answer within {timeout:g} s", place) from error
    except aiohttp.InvalidURL as error:
        raise _error("not a valid URL", place) from error
    except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
        raise _RetryableError(f"{type(error).__name__}: {error}") from error
    if answer.status in RETRY_STATUSES or worker_was_lost(answer.status, text.encode()):
        raise _RetryableError(f"status {answer.status}", answer.status, text[:_BODY_CHARS])
    if answer.status >= 400:
        raise _error(f"status {answer.status}", place, answer.status, text[:_BODY_CHARS])
    return _parsed(text, answer.content_type, place, answer.status)


def _parsed(text: str, content_type: str, place: str, status: int) -> Any:
    if not content_type.endswith("json"):
        return text
    try:
        return json.loads(text)
    except ValueError as error:
        raise _error(f"answer is not JSON ({error})", place, status, text[:_BODY_CHARS]) from error


_Holder = tuple["aiohttp.ClientSession", AsyncGenerator["aiohttp.ClientSession", None]]
_sessions: dict[asyncio.AbstractEventLoop, _Holder] = {}


async def http_session() -> aiohttp.ClientSession:
    """The session of the running loop, without a limit on connections.

    A suspended generator holds it, which the loop closes at its end.
    """
    loop = asyncio.get_running_loop()
    if loop not in _sessions:
        for closed in [other for other in _sessions if other.is_closed()]:
            del _sessions[closed]
        holder = _open_session()
        _sessions[loop] = (await anext(holder), holder)
    return _sessions[loop][0]


async def _open_session() -> AsyncGenerator[aiohttp.ClientSession, None]:
    import aiohttp

    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, trust_env=False) as session:
        yield session

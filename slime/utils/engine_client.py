"""Client of one engine, or of a router before several, in SGLang's native HTTP protocol.

Invariant: every request has a deadline; a retry happens only where it can help; a cancelled generation is
aborted at the engine by its rid; every sampled token comes back with its id and log-prob, or an error does;
what a router would lose of a body goes to a worker itself. Knows nothing of samples, tokenizers or schedules.
aiohttp is imported at the first request.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import orjson

from slime.errors import DeadlineError, EngineError, EngineRequestError, EngineUnavailableError
from slime.utils.capabilities import Capabilities
from slime.utils.engine_answers import (
    OnTokens,
    TransientError,
    as_object,
    check_succeeded,
    checked_answer,
    last_of_stream,
    loads_of,
)
from slime.utils.engine_probe import probe
from slime.utils.generation import Generation, parse_generation
from slime.utils.http_utils import http_session
from slime.utils.rendezvous import chosen
from slime.utils.request_scope import RequestScope, current_scope
from slime.utils.router_bodies import lost_fields

logger = logging.getLogger(__name__)
ABORT_SECONDS = 2.0
"""Deadline of the abort that follows a cancellation; below the grace that cancelled hooks get."""
CONTROL_SECONDS = 120.0
CONNECT_SECONDS = 10.0
LISTING_SECONDS = 2.0
"""How long a router's list of workers is believed."""
ROUTING_HEADER = "X-SMG-Routing-Key"
_DISAGGREGATED = frozenset({"prefill", "decode"})
UrlOf: TypeAlias = Callable[[int], Awaitable[str]]
"""Where a try goes, by its number."""
START_LEN = "routed_experts_start_len"
"""SGLang does not tell it in answers; it is what the request asked for."""

_aborts: set[asyncio.Task[None]] = set()
"""Aborts under way: the event loop itself holds tasks only weakly."""


@dataclass(frozen=True)
class _Listing:
    """A router's workers.

    Attributes:
        workers: as it lists them.
        passes_bodies: whether it passes bodies on as they are.
        read_at: monotonic seconds.
    """

    workers: Sequence[dict[str, Any]]
    passes_bodies: bool
    read_at: float

    @property
    def healthy(self) -> tuple[str, ...]:
        """Base URLs of those that it holds for healthy."""
        return tuple(
            str(worker["url"]).rstrip("/") for worker in self.workers if worker.get("is_healthy", True)
        )


class EngineClient:
    """Talks to the engine at `url`.

    Args:
        retries: tries after the first, where a retry can help.
        patience: seconds in which tries go on beyond that number: engines that are replaced come back.
        backoff: seconds before the first retry; doubles up to 5 s, half of it random.
    """

    def __init__(self, url: str, *, retries: int = 5, backoff: float = 0.25, patience: float = 0.0) -> None:
        self.url = url.rstrip("/")
        self._retries = retries
        self._backoff = backoff
        self._patience = patience
        self._is_engine = False
        self._listing: _Listing | None = None
        self._capabilities: dict[str, Capabilities] = {}

    async def generate(
        self,
        input_ids: Sequence[int] | npt.NDArray[np.int32],
        sampling_params: dict[str, Any],
        *,
        rid: str | None = None,
        routing_key: str | None = None,
        timeout: float,
        on_tokens: OnTokens | None = None,
        image_data: Sequence[str] = (),
        return_routed_experts: bool = False,
        routed_experts_start: int = 0,
    ) -> Generation:
        """Sample one continuation of `input_ids`, as part of the current `RequestScope`.

        Args:
            input_ids: token ids; a numpy array is sent without being copied into Python numbers.
            rid: name of the request at the engine (default: a fresh one).
            routing_key: keeps a session on one worker.
            timeout: seconds for all tries together; a scope may have less.
            image_data: images as ``data:`` or other URLs, one for each placeholder among the ids, in order;
                the engine expands the placeholders.
            return_routed_experts: ask a mixture-of-experts engine for the routes of each token but the last:
                base64 of int32 [tokens - 1 - start, layers, top_k] in ``meta_info["routed_experts"]``. Such a
                request goes to a worker itself, the same one for a routing key.
            routed_experts_start: tokens whose routes are not wanted; told in the answer's `meta_info`.
            on_tokens: called whenever there are new tokens; from then on there is no retry.

        Raises:
            EngineRequestError: 4xx, with the engine's message.
            EngineUnavailableError: the engine cannot be reached, or died while it generated.
            EngineError: it failed (5xx), or its answer lacks token ids or log-probs.
            DeadlineError: no answer within `timeout`; the request was aborted.
        """
        rid = rid or uuid.uuid4().hex
        headers = {ROUTING_HEADER: routing_key} if routing_key else {}
        body: dict[str, Any] = {
            "rid": rid,
            "input_ids": input_ids,
            "sampling_params": sampling_params,
            "return_logprob": True,
        }
        if on_tokens is not None:
            body["stream"] = True
        if image_data:
            body["image_data"] = list(image_data)
        if return_routed_experts:
            body |= {"return_routed_experts": True, START_LEN: routed_experts_start}
        scope = current_scope()
        if scope is None:
            return await self._generate(rid, body, headers, timeout, on_tokens)
        if scope.stopped:
            return parse_generation(scope.refuse(), self.url)
        if scope.timeout is not None:
            timeout = min(timeout, scope.timeout)
        return await self._generate_in(
            scope, rid, {**scope.fields_at(self.url), **body}, headers, timeout, on_tokens
        )

    async def _generate_in(
        self,
        scope: RequestScope,
        rid: str,
        body: dict[str, Any],
        headers: dict[str, str],
        timeout: float,
        on_tokens: OnTokens | None,
    ) -> Generation:
        """The same, held by a scope and told to it."""
        with scope.holding(rid, self.abort, len(body["input_ids"])) as call:
            generation = await self._generate(rid, body, headers, timeout, on_tokens)
            call.tokens, call.finish = len(generation.output_ids), generation.finish_reason or ""
            call.versions = tuple(span.version for span in generation.weight_versions)
        return generation

    async def _generate(
        self,
        rid: str,
        body: dict[str, Any],
        headers: dict[str, str],
        timeout: float,
        on_tokens: OnTokens | None,
    ) -> Generation:
        place = f"{self.url}, request {rid}"
        target = self._target_of(body, headers.get(ROUTING_HEADER) or rid)
        try:
            answer = await self._request(
                "POST", target, body, timeout, headers=headers, place=place, on_tokens=on_tokens
            )
        except (asyncio.CancelledError, DeadlineError):
            await self._abort_soon(rid)
            raise
        generation = parse_generation(answer, self.url)
        if START_LEN in body:
            generation.meta_info[START_LEN] = body[START_LEN]
        return generation

    async def abort(self, rid: str) -> None:
        """Abort the request `rid` (and its retries); an unknown rid is no error."""
        await self._broadcast("/abort_request", {"rid": rid}, ABORT_SECONDS)

    async def abort_all(self) -> None:
        """Abort everything that runs or waits."""
        await self._broadcast("/abort_request", {"abort_all": True}, CONTROL_SECONDS)

    async def pause(self, mode: str) -> None:
        """Pause generation: ``abort`` ends running requests, ``in_place`` and ``retract`` keep them."""
        await self._broadcast("/pause_generation", {"mode": mode})

    async def resume(self) -> None:
        """Continue after `pause`."""
        await self._broadcast("/continue_generation", {})

    async def flush_cache(self) -> None:
        """Drop the prefix cache.

        Raises:
            EngineRequestError: requests are running.
        """
        await self._broadcast("/flush_cache", {})

    async def health(self, timeout: float = 30.0) -> bool:
        """True if the engine generates a token within `timeout` seconds."""
        return await self.why_not_generating(timeout) is None

    async def why_not_generating(self, timeout: float) -> str | None:
        """What is wrong with an engine that generates no token within `timeout` seconds; None if it does."""
        try:
            async with asyncio.timeout(timeout):
                await self._once("GET", self.url + "/health_generate", None, {})
        except TimeoutError:
            return f"no answer of /health_generate within {timeout:g} s"
        except (TransientError, EngineError) as error:
            return f"/health_generate: {error}"
        return None

    async def why_silent(self, timeout: float) -> str | None:
        """What is wrong with a process that answers no HTTP at all; None if it does, be it with an error.

        Generates nothing, so that a paused engine answers too.
        """
        import aiohttp

        session = await http_session()
        try:
            async with asyncio.timeout(timeout), session.get(self.url + "/model_info") as response:
                await response.read()
        except TimeoutError:
            return f"no answer of /model_info within {timeout:g} s"
        except aiohttp.ClientError as error:
            return f"/model_info: {type(error).__name__}: {error}"
        return None

    async def server_info(self) -> dict[str, Any]:
        """``/server_info`` of the first worker."""
        return await self._get_object("/server_info")

    async def model_info(self) -> dict[str, Any]:
        """``/model_info`` of the first worker: model path and weight version."""
        return await self._get_object("/model_info")

    async def capabilities(self) -> dict[str, Capabilities]:
        """What each worker can do, by its URL; asked once.

        Raises:
            EngineError: one is no engine, or of a version that cannot be used.
        """
        urls = await self.workers()
        unknown = [url for url in urls if url not in self._capabilities]
        found = await asyncio.gather(*(probe(url) for url in unknown))
        self._capabilities |= dict(zip(unknown, found, strict=True))
        return {url: self._capabilities[url] for url in urls}

    async def loads(self) -> list[dict[str, Any]]:
        """One entry a scheduler of each worker: running and waiting requests, tokens in use."""
        able = await self.capabilities()
        answers = await asyncio.gather(
            *(self._request("GET", url + can.loads_route, None, CONTROL_SECONDS) for url, can in able.items())
        )
        return [load for answer in answers for load in loads_of(answer)]

    async def begin_weight_update(self) -> None:
        """Open a weight update, where the engine has sessions of them."""
        await self._in_session("/begin_weight_update")

    async def end_weight_update(self) -> None:
        """Close a weight update."""
        await self._in_session("/end_weight_update")

    async def _in_session(self, path: str) -> None:
        able = await self.capabilities()
        with_sessions = [url for url, can in able.items() if can.weight_sessions]
        await asyncio.gather(
            *(self._request("POST", url + path, {}, CONTROL_SECONDS) for url in with_sessions)
        )

    async def update_weights_from_tensor(
        self,
        serialized_named_tensors: Sequence[str],
        *,
        weight_version: str,
        load_format: str | None = None,
        flush_cache: bool = True,
        timeout: float = 600.0,
    ) -> None:
        """Load tensors that another process shares.

        Raises:
            EngineError: the engine did not take them.
        """
        body = {
            "serialized_named_tensors": list(serialized_named_tensors),
            "load_format": load_format,
            "flush_cache": flush_cache,
            "weight_version": weight_version,
        }
        check_succeeded(await self._broadcast("/update_weights_from_tensor", body, timeout), self.url)

    async def update_weights_from_disk(
        self, model_path: str, *, weight_version: str, flush_cache: bool = True, timeout: float = 600.0
    ) -> None:
        """Load a Hugging Face folder.

        Raises:
            EngineError: the engine did not take it.
        """
        body = {"model_path": model_path, "weight_version": weight_version, "flush_cache": flush_cache}
        check_succeeded(await self._broadcast("/update_weights_from_disk", body, timeout), self.url)

    async def release_memory(self, tags: Sequence[str] | None = None) -> None:
        """Give up memory: ``kv_cache``, ``weights``, ``cuda_graph`` (default: all)."""
        await self._broadcast("/release_memory_occupation", _tags(tags))

    async def resume_memory(self, tags: Sequence[str] | None = None) -> None:
        """Take the memory back."""
        await self._broadcast("/resume_memory_occupation", _tags(tags))

    async def workers(self) -> tuple[str, ...]:
        """Base URLs of the healthy ones behind a router, which passes no control call on; else the engine."""
        listing = await self._list()
        return (self.url,) if listing is None else listing.healthy

    async def _list(self) -> _Listing | None:
        """What a router has now; None where there is none."""
        if self._is_engine:
            return None
        try:
            answer = await self._request("GET", self.url + "/workers", None, CONTROL_SECONDS)
        except EngineRequestError:
            self._is_engine = True
            return None
        found = as_object(answer, "/workers")
        self._listing = _Listing(found["workers"], bool(found.get("passes_bodies")), time.monotonic())
        return self._listing

    def _target_of(self, body: dict[str, Any], key: str) -> str | UrlOf:
        """Where a generation goes: to `url`, unless a router there would lose something of the body."""
        lost = [] if self._is_engine else lost_fields(body)
        if not lost:
            return self.url + "/generate"

        async def url_of(attempt: int) -> str:
            return await self._worker_for(key, lost, is_retry=attempt > 0) + "/generate"

        return url_of

    async def _worker_for(self, key: str, lost: Sequence[str], *, is_retry: bool) -> str:
        listing = self._listing
        if listing is None or is_retry or time.monotonic() - listing.read_at > LISTING_SECONDS:
            listing = await self._list()
        if listing is None or listing.passes_bodies:
            return self.url
        if any(worker.get("worker_type") in _DISAGGREGATED for worker in listing.workers):
            raise EngineError(
                f"the router drops {', '.join(lost)}, and a prefilling and a decoding worker cannot be asked "
                "without it",
                place=self.url,
                remedy="regular workers, or leave that out of the request",
            )
        if not listing.healthy:
            raise TransientError("the router has no healthy worker")
        return chosen(key, listing.healthy)

    async def _abort_soon(self, rid: str) -> None:
        """Abort in a task of its own, which a second cancellation of the caller does not end."""
        task = asyncio.create_task(self._abort_within_deadline(rid))
        _aborts.add(task)
        task.add_done_callback(_aborts.discard)
        await asyncio.wait({task})

    async def _abort_within_deadline(self, rid: str) -> None:
        try:
            async with asyncio.timeout(ABORT_SECONDS):
                await self.abort(rid)
        except (EngineError, DeadlineError, TimeoutError) as error:
            logger.warning("%s: request %s could not be aborted: %s", self.url, rid, error)

    async def _broadcast(
        self, path: str, body: dict[str, Any] | None, timeout: float = CONTROL_SECONDS, method: str = "POST"
    ) -> list[Any]:
        """The same control call at every worker."""
        urls = await self.workers()
        return await asyncio.gather(*(self._request(method, url + path, body, timeout) for url in urls))

    async def _get_object(self, path: str) -> dict[str, Any]:
        workers = await self.workers()
        if not workers:
            raise EngineUnavailableError("the router has no healthy worker", place=self.url)
        url = workers[0] + path
        return as_object(await self._request("GET", url, None, CONTROL_SECONDS), path)

    async def _request(
        self,
        method: str,
        url: str | UrlOf,
        body: dict[str, Any] | None,
        timeout: float,
        *,
        headers: dict[str, str] | None = None,
        place: str | None = None,
        on_tokens: OnTokens | None = None,
    ) -> Any:
        """One call with all its tries, within `timeout` seconds."""
        try:
            async with asyncio.timeout(timeout):
                return await self._with_retries(method, url, body, headers or {}, on_tokens)
        except TimeoutError as error:
            raise DeadlineError(f"no answer within {timeout:g} s", place=place or str(url)) from error

    async def _with_retries(
        self,
        method: str,
        target: str | UrlOf,
        body: dict[str, Any] | None,
        headers: dict[str, str],
        on_tokens: OnTokens | None,
    ) -> Any:
        url, give_up_at = self.url, time.monotonic() + self._patience
        for attempt in itertools.count():
            try:
                url = target if isinstance(target, str) else await target(attempt)
                return await self._once(method, url, body, headers, on_tokens)
            except TransientError as error:
                if attempt >= self._retries and time.monotonic() >= give_up_at:
                    raise EngineUnavailableError(
                        f"{error} ({attempt + 1} tries)", place=url, remedy="see the log of the engine"
                    ) from error
            await asyncio.sleep(min(self._backoff * 2.0 ** min(attempt, 16), 5.0) * random.uniform(0.5, 1.0))
        raise AssertionError("unreachable: attempts have no end")

    async def _once(
        self,
        method: str,
        url: str,
        body: dict[str, Any] | None,
        headers: dict[str, str],
        on_tokens: OnTokens | None = None,
    ) -> Any:
        import aiohttp

        limits = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS)
        data = None if body is None else orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
        headers = headers | {"Content-Type": "application/json"}
        session = await http_session()
        try:
            async with session.request(method, url, data=data, headers=headers, timeout=limits) as response:
                if on_tokens is not None and response.status == 200:
                    return await last_of_stream(response, on_tokens, url)
                content = await response.read()
        except aiohttp.ClientPayloadError as error:
            raise EngineUnavailableError(f"died while it answered: {error}", place=url) from error
        except aiohttp.ClientConnectionError as error:
            raise TransientError(f"{type(error).__name__}: {error}") from error
        return checked_answer(response.status, content, url)


def _tags(tags: Sequence[str] | None) -> dict[str, Any]:
    return {} if tags is None else {"tags": list(tags)}

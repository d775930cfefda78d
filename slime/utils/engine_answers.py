"""What an engine's HTTP answers say: whole ones, streams of them, and refusals.

Invariant: an answer without what training needs is an error that names the engine; only what a retry can help
is a `TransientError`. Knows shapes, and nothing of requests or retries.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import orjson

from slime.errors import EngineError, EngineRequestError, EngineUnavailableError
from slime.utils.generation import version_spans
from slime.utils.router_answers import worker_was_lost

if TYPE_CHECKING:
    import aiohttp

RETRY_STATUSES = frozenset({429, 502, 503, 504})
_DATA, _DONE = b"data: ", b"data: [DONE]"


class NewTokens(NamedTuple):
    """Tokens that were sampled since the last ones were told, in parallel lists.

    Attributes:
        log_probs: natural logs.
        versions: the weight version of each, where the engine tells it.
    """

    ids: list[int]
    log_probs: list[float]
    versions: list[str]


OnTokens: TypeAlias = Callable[[NewTokens], None]


class TransientError(Exception):
    """A failure that a retry can help."""


def _new_tokens(ids: list[int], meta: dict[str, Any], seen: int) -> NewTokens:
    log_probs = [entry[0] for entry in meta.get("output_token_logprobs", ())[seen:]]
    versions = [
        span.version
        for span in version_spans(meta, len(ids))
        for _ in range(max(span.start, seen), min(span.end, len(ids)))
    ]
    return NewTokens(ids[seen:], log_probs, versions)


async def last_of_stream(response: aiohttp.ClientResponse, on_tokens: OnTokens, url: str) -> Any:
    """The last answer of a stream in which each holds all tokens so far."""
    buffer, seen, answer = b"", 0, None
    async for chunk in response.content.iter_any():
        *events, buffer = (buffer + chunk).split(b"\n\n")
        answers = [event[len(_DATA) :] for event in events if event.startswith(_DATA) and event != _DONE]
        if not answers:
            continue
        answer = as_object(_parsed(answers[-1]), url)
        if "error" in answer:
            raise EngineError(f"failed while it answered: {_message(answers[-1])}", place=url)
        ids, meta = answer.get("output_ids") or [], answer.get("meta_info") or {}
        count = meta.get("completion_tokens")
        if count is not None and count != len(ids):
            raise EngineError(
                f"its stream tells of {count} tokens and holds {len(ids)}",
                place=url,
                remedy="start the engine without incremental streaming: each event must hold all tokens",
            )
        if len(ids) > seen:
            on_tokens(_new_tokens(ids, meta, seen))
            seen = len(ids)
    if answer is None or not answer.get("meta_info", {}).get("finish_reason"):
        raise EngineUnavailableError("its stream ended before the answer did", place=url)
    return answer


def checked_answer(status: int, content: bytes, url: str) -> Any:
    """The parsed body of a good answer; JSON where it is JSON, else text."""
    if status in RETRY_STATUSES or worker_was_lost(status, content):
        raise TransientError(f"answered {status}: {_message(content)}")
    if 400 <= status < 500:
        raise EngineRequestError(f"answered {status}: {_message(content)}", place=url)
    if status >= 500:
        raise EngineError(f"answered {status}: {_message(content)}", place=url)
    return _parsed(content)


def _parsed(content: bytes) -> Any:
    try:
        return orjson.loads(content)
    except orjson.JSONDecodeError:
        return content.decode(errors="replace")


def _message(content: bytes) -> str:
    """The engine's own words: ``{"error": {"message": ...}}``, ``{"error": ...}``, or the text."""
    parsed = _parsed(content)
    error = parsed.get("error", parsed) if isinstance(parsed, dict) else parsed
    return str(error.get("message", error) if isinstance(error, dict) else error)[:2000]


def as_object(answer: Any, path: str) -> dict[str, Any]:
    """An answer that must be a JSON object.

    Raises:
        EngineError: it is something else.
    """
    if not isinstance(answer, dict):
        raise EngineError(f"{path} answered {answer!r:.200}, expected an object")
    return answer


def loads_of(answer: Any) -> list[dict[str, Any]]:
    """The entries of ``/v1/loads``, or of the older ``/get_load`` under the same names."""
    if not isinstance(answer, list):
        return list(as_object(answer, "/v1/loads").get("loads", []))
    return [
        {
            "dp_rank": load["dp_rank"],
            "num_running_reqs": load["num_reqs"] - load["num_waiting_reqs"],
            "num_waiting_reqs": load["num_waiting_reqs"],
            "num_used_tokens": load["num_tokens"],
        }
        for load in answer
    ]


def check_succeeded(answers: list[Any], url: str) -> None:
    """Check that every worker took its weights.

    Raises:
        EngineError: one did not.
    """
    for answer in answers:
        if isinstance(answer, dict) and answer.get("success") is False:
            raise EngineError(f"weight update failed: {answer.get('message')}", place=url)

"""From engine `Update`s to the JSON that SGLang sends: answers, `meta_info`, SSE chunks, errors.

Invariant: keys and value shapes are SGLang's, so that clients and router
cannot tell. Knows nothing of sockets.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from slime.serving.embedded.request import Request, TopLogprobs, Update

TokenText: TypeAlias = Callable[[int], str | None]
"""Token id -> its text, or None where no text was asked for."""


def no_text(_: int) -> None:
    """The `TokenText` of answers without token texts."""


def generate_answer(
    request: Request, update: Update, *, latency: float, token_text: TokenText
) -> dict[str, Any]:
    """The answer (or cumulative chunk) for one request. `latency` is seconds since it arrived."""
    return {
        "text": update.text,
        "output_ids": update.output_ids,
        "meta_info": meta_info(request, update, latency=latency, token_text=token_text),
    }


def meta_info(request: Request, update: Update, *, latency: float, token_text: TokenText) -> dict[str, Any]:
    """SGLang's `meta_info`; log-prob keys only where log-probs were asked for."""
    count = len(update.output_ids)
    cached = update.cached_tokens
    return {
        "id": request.rid,
        "finish_reason": update.finish_reason,
        "prompt_tokens": update.prompt_tokens,
        "weight_version": update.weight_version,
        "num_retractions": update.num_retractions,
        **(_logprobs(request, update, token_text) if request.return_logprob else {}),
        "reasoning_tokens": 0,
        "completion_tokens": count,
        "cached_tokens": cached,
        "weight_versions": version_spans(update),
        "cached_tokens_details": {"device": cached, "host": 0} if cached else None,
        "dp_rank": None,
        "e2e_latency": latency,
        "response_sent_to_client_ts": time.time(),
        **update.more_meta,
    }


def version_spans(update: Update) -> list[dict[str, Any]]:
    """Weight versions over the output; an empty output has one empty span."""
    return update.weight_versions or [{"version": update.weight_version, "start": 0, "end": 0}]


def _logprobs(request: Request, update: Update, token_text: TokenText) -> dict[str, Any]:
    pairs = zip(update.output_logprobs, update.output_ids, strict=True)
    values: dict[str, Any] = {
        "input_token_logprobs": [(value, token, token_text(token)) for value, token in update.input_logprobs],
        "output_token_logprobs": [(value, token, token_text(token)) for value, token in pairs],
        "output_token_logprobs_length": len(update.output_ids),
    }
    if request.top_logprobs_num:
        values["input_top_logprobs"] = _tops(update.input_top_logprobs, token_text)
        values["output_top_logprobs"] = _tops(update.output_top_logprobs, token_text)
    return values


def _tops(positions: Sequence[TopLogprobs | None], token_text: TokenText) -> list[Any]:
    return [top and [(value, token, token_text(token)) for value, token in top] for top in positions]


def error_body(message: str) -> dict[str, Any]:
    """SGLang's error object."""
    return {"error": {"message": message}}

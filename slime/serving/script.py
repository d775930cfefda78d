"""What a scripted engine is asked and answers, and how an answer meets the limits of its request.

Invariant: the same answer and request give the same tokens, text and log-probs. Pure; knows nothing of
threads, time or HTTP.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from slime.serving.embedded.request import Request, SamplingParams, Update


@dataclass(frozen=True, kw_only=True)
class ScriptedCall:
    """What a policy is asked.

    Attributes:
        number: 0 for the engine's first request, then counting.
        prompt: the decoded prompt, special tokens included.
        images: URLs of the images.
    """

    number: int
    rid: str
    input_ids: tuple[int, ...]
    prompt: str
    params: SamplingParams
    weight_version: str
    images: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ScriptedAnswer:
    """What a policy answers. Limits and stops of the request apply to it as to sampled tokens.

    Attributes:
        text: the answer; encoded, with the end-of-sequence token behind it where `ends`.
        token_ids: the answer as ids, taken as they are; `text` and `ends` are then ignored.
        logprobs: one per token; None makes them up from the ids (`scripted_logprob`).
        cached_tokens: None counts the longest prefix in common with earlier requests.
        delay: seconds before the first token.
        token_latency: seconds between tokens.
        error: answer with this HTTP status and message instead.
        error_after: tokens that come before the error.
        hang: never answer; only an abort ends it.
        die_after: the engine's worker dies after so many tokens, and its connections with it.
        meta_info: further entries of the answer's `meta_info`, such as counters of speculative decoding.
    """

    text: str = ""
    token_ids: Sequence[int] | None = None
    ends: bool = True
    logprobs: Sequence[float] | None = None
    cached_tokens: int | None = None
    delay: float = 0.0
    token_latency: float = 0.0
    error: tuple[int, str] | None = None
    error_after: int = 0
    hang: bool = False
    die_after: int | None = None
    meta_info: Mapping[str, Any] = field(default_factory=dict)


Policy: TypeAlias = Callable[[ScriptedCall], ScriptedAnswer]


@dataclass(frozen=True, kw_only=True)
class Script:
    """An answer cut to its request: the tokens, their log-probs, and the finish reason."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    ending: dict[str, Any]


def scripted_logprob(token: int) -> float:
    """The made-up natural log-prob of a token: a fixed value in [-0.8, -0.1]."""
    return -(1 + token % 8) / 10


def script_of(answer: ScriptedAnswer, params: SamplingParams, tokenizer: Any) -> Script:
    """Apply stop tokens, stop strings and `max_new_tokens` to an answer.

    Raises:
        ValueError: fewer log-probs than tokens.
    """
    ids = _encoded(answer, tokenizer) if answer.token_ids is None else list(answer.token_ids)
    logprobs = [scripted_logprob(token) for token in ids] if answer.logprobs is None else answer.logprobs
    if len(logprobs) < len(ids):
        raise ValueError(f"the policy gave {len(logprobs)} logprobs for {len(ids)} tokens")
    count, ending = _ending(ids, params, tokenizer)
    return Script(token_ids=ids[:count], logprobs=logprobs[:count], ending=ending)


def update_of(
    request: Request,
    script: Script,
    tokenizer: Any,
    *,
    versions: Sequence[str],
    weight_version: str,
    finish_reason: dict[str, Any] | None,
    cached_tokens: int,
    num_retractions: int,
    more_meta: Mapping[str, Any],
) -> Update:
    """The state of a request with `len(versions)` tokens out; each entry is that token's weight version."""
    ids = list(script.token_ids[: len(versions)])
    values = list(script.logprobs[: len(versions)])
    tops = range(request.top_logprobs_num)
    return Update(
        rid=request.rid,
        text=_text(ids, request.params, finish_reason, tokenizer),
        output_ids=ids,
        output_logprobs=values if request.return_logprob else [],
        input_logprobs=_input_logprobs(request),
        output_top_logprobs=[
            [(value - k, (token + k) % len(tokenizer)) for k in tops]
            for token, value in zip(ids, values, strict=True)
            if tops
        ],
        input_top_logprobs=[],
        finish_reason=finish_reason,
        prompt_tokens=len(request.input_ids),
        cached_tokens=cached_tokens,
        weight_version=weight_version,
        weight_versions=_spans(versions, weight_version),
        num_retractions=num_retractions,
        more_meta=more_meta,
    )


def aborted(message: str, status: int | None = None) -> dict[str, Any]:
    """The finish reason of an abort; with a status, the HTTP answer is an error."""
    return {"type": "abort", "message": message, "status_code": status, "err_type": None}


def _encoded(answer: ScriptedAnswer, tokenizer: Any) -> list[int]:
    ids = list(tokenizer.encode(answer.text, add_special_tokens=False))
    return [*ids, tokenizer.eos_token_id] if answer.ends else ids


def _ending(ids: list[int], params: SamplingParams, tokenizer: Any) -> tuple[int, dict[str, Any]]:
    """How many of the tokens come out, and the finish reason."""
    stops = frozenset() if params.ignore_eos else params.stop_token_ids | {tokenizer.eos_token_id}
    for count, token in enumerate(ids[: params.max_new_tokens], start=1):
        if token in stops:
            return count, {"type": "stop", "matched": token}
        text = tokenizer.decode(ids[:count]) if params.stop else ""
        for stop in params.stop:
            if stop in text:
                return count, {"type": "stop", "matched": stop}
    if len(ids) < params.max_new_tokens:
        return len(ids), {"type": "stop", "matched": None}
    return params.max_new_tokens, {"type": "length", "length": params.max_new_tokens}


def _text(
    ids: list[int], params: SamplingParams, finish_reason: dict[str, Any] | None, tokenizer: Any
) -> str:
    """Decoded text without the stop; a character of which bytes are missing waits for them."""
    matched = (finish_reason or {}).get("matched")
    if isinstance(matched, int) and not params.no_stop_trim:
        ids = ids[:-1]
    text: str = tokenizer.decode(ids, skip_special_tokens=params.skip_special_tokens)
    if isinstance(matched, str) and not params.no_stop_trim:
        return text[: text.index(matched)]
    return text if finish_reason else text.rstrip("\ufffd")


def _input_logprobs(request: Request) -> list[tuple[float | None, int]]:
    if not request.return_logprob or request.logprob_start_len < 0:
        return []
    ids = request.input_ids[request.logprob_start_len :]
    return [(None, ids[0]), *((scripted_logprob(token), token) for token in ids[1:])]


def _spans(versions: Sequence[str], current: str) -> list[dict[str, Any]]:
    """Runs of equal versions as ``{"version", "start", "end"}``."""
    first = versions[0] if versions else current
    spans: list[dict[str, Any]] = [{"version": first, "start": 0, "end": len(versions)}]
    for position, version in enumerate(versions):
        if version != spans[-1]["version"]:
            spans[-1]["end"] = position
            spans.append({"version": version, "start": position, "end": len(versions)})
    return spans

"""One engine answer, typed: the sampled tokens, their log-probs, and why they ended.

Invariant: `output_ids` and `log_probs` have the same length and come from the engine alone (law 1).
Knows the shape of SGLang's answer; nothing of HTTP.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from slime.errors import EngineError


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Output tokens `start` (included) to `end` (excluded) were sampled by weights `version`."""

    version: str
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """What the engine sampled.

    Attributes:
        log_probs: natural logs, one an output id.
        finish_reason: ``stop``, ``length`` or ``abort``; None where the engine gives none.
        meta_info: the engine's `meta_info`, whole.
    """

    output_ids: list[int]
    log_probs: list[float]
    text: str
    finish_reason: str | None
    weight_versions: tuple[VersionSpan, ...]
    meta_info: dict[str, Any]


def parse_generation(answer: Any, url: str) -> Generation:
    """Check and type an answer of ``/generate``.

    Raises:
        EngineError: not the expected shape; names the capability that the engine lacks.
    """
    meta = answer.get("meta_info") if isinstance(answer, dict) else None
    if not isinstance(meta, dict):
        raise EngineError(f"/generate answered {answer!r:.300}, expected an object with meta_info", place=url)
    ids, entries = answer.get("output_ids"), meta.get("output_token_logprobs")
    if not isinstance(ids, list):
        raise EngineError(
            "the engine does not return token ids (`output_ids`)",
            place=url,
            remedy="training needs the sampled ids: use an engine that speaks SGLang's native /generate",
        )
    if not isinstance(entries, list):
        raise EngineError(
            "the engine does not return log-probs (`meta_info.output_token_logprobs`)",
            place=url,
            remedy="it must honour return_logprob; a router that drops the field must be bypassed",
        )
    return Generation(
        output_ids=ids,
        log_probs=_log_probs(ids, entries, url),
        text=answer.get("text") or "",
        finish_reason=_finish_reason(meta),
        weight_versions=version_spans(meta, len(ids)),
        meta_info=meta,
    )


def _log_probs(ids: list[int], entries: list[Any], url: str) -> list[float]:
    if len(entries) != len(ids):
        raise EngineError(f"{len(entries)} log-probs for {len(ids)} output ids", place=url)
    values = []
    for position, (token, entry) in enumerate(zip(ids, entries, strict=True)):
        if entry[1] != token:
            raise EngineError(f"log-prob {position} is of token {entry[1]}, output id is {token}", place=url)
        if not isinstance(entry[0], float | int):
            raise EngineError(f"log-prob {position} is {entry[0]!r}, expected a number", place=url)
        values.append(float(entry[0]))
    return values


def _finish_reason(meta: dict[str, Any]) -> str | None:
    reason = meta.get("finish_reason")
    kind = reason.get("type") if isinstance(reason, dict) else reason
    return None if kind is None else str(kind)


def version_spans(meta: dict[str, Any], count: int) -> tuple[VersionSpan, ...]:
    """`weight_versions`; engines before it exists give one version for the whole."""
    spans = meta.get("weight_versions")
    if spans is not None:
        return tuple(VersionSpan(str(s["version"]), s["start"], s["end"]) for s in spans)
    version = meta.get("weight_version")
    return () if version is None else (VersionSpan(str(version), 0, count),)

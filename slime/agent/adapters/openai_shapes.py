"""What both OpenAI protocols put on the wire alike: server-sent events, errors, and the ids of a turn.

Invariant: every id of one turn has the turn's stem, so that items of a turn are known as such when a client
sends them back in pieces. Knows no request.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from slime.agent.adapters.wire import AdapterError, ErrorKind, Usage

DONE = b"data: [DONE]\n\n"
_STEMMED = re.compile(
    r"(?:(?:resp|rs|msg|fc|ctc|call)_([0-9a-f]{16})[0-9a-f]{8}|enc_([0-9a-f]{16})[0-9a-f]{32})\Z"
)
# Closed: 403 ends opencode, qwen-code and the SDKs at once, Codex after its six tries.
_REFUSALS: dict[ErrorKind, tuple[int, str, str | None]] = {
    "authentication": (401, "invalid_request_error", "invalid_api_key"),
    "invalid_request": (400, "invalid_request_error", None),
    "context_overflow": (400, "invalid_request_error", "context_length_exceeded"),
    "rate_limit": (429, "rate_limit_error", "rate_limit_exceeded"),
    "overloaded": (503, "server_error", "service_unavailable"),
    "upstream": (500, "server_error", "server_error"),
    "not_found": (404, "invalid_request_error", "not_found"),
    "too_large": (413, "invalid_request_error", "request_too_large"),
    "closed": (403, "invalid_request_error", "session_closed"),
}
# Clients tell a full context by these words, not by the code alone.
_OVERFLOW = "the input exceeds the context window of this model (context_length_exceeded)"


_CODEX = (("originator", "codex"), ("user-agent", "codex"))
_QWEN_CODE = (("user-agent", "QwenCode"),)
_WORTH_ANOTHER_TRY = frozenset({"rate_limit", "overloaded", "upstream"})


@dataclass(frozen=True)
class ClientTraits:
    """What the client makes of endings that are not plain.

    Attributes:
        ends_at_incomplete: an answer that reached its limit ends its run.
        ends_at_failure: so does a failure in the midst of a stream, though it asks again where one is cut.
    """

    ends_at_incomplete: bool = False
    ends_at_failure: bool = False

    @classmethod
    def of(cls, headers: Mapping[str, str]) -> ClientTraits:
        """By what Codex 0.171.0 and qwen-code 0.24.4 were seen to do."""
        known = {name.lower(): value for name, value in headers.items()}
        is_codex, is_qwen_code = (
            any(known.get(name, "").startswith(start) for name, start in signs)
            for signs in (_CODEX, _QWEN_CODE)
        )
        return cls(ends_at_incomplete=is_codex, ends_at_failure=is_codex or is_qwen_code)

    def is_better_cut(self, error: AdapterError) -> bool:
        """Whether to cut the stream rather than tell of an error that another try can get past."""
        return self.ends_at_failure and error.kind in _WORTH_ANOTHER_TRY


class TurnIds:
    """Mints the ids of one turn; none can be guessed.

    Attributes:
        minted: all of them, in order.
    """

    def __init__(self) -> None:
        self._stem = secrets.token_hex(8)
        self.minted: list[str] = []

    def mint(self, prefix: str) -> str:
        """A new id: 24 hexadecimal digits after the prefix, 48 for ``enc``."""
        name = f"{prefix}_{self._stem}{secrets.token_hex(16 if prefix == 'enc' else 4)}"
        self.minted.append(name)
        return name


def stem_of(handle: str | None) -> str | None:
    """The stem of an id that `TurnIds` minted; None for any other."""
    found = _STEMMED.match(handle or "")
    return (found[1] or found[2]) if found else None


def sse(data: Mapping[str, Any], event: str | None = None) -> bytes:
    """One server-sent event."""
    head = f"event: {event}\n".encode() if event else b""
    return b"%sdata: %s\n\n" % (head, orjson.dumps(data))


def refusal(error: AdapterError) -> tuple[int, dict[str, Any]]:
    """Status and body of an error."""
    status, kind, code = _REFUSALS[error.kind]
    return status, {"error": {"message": error_text(error), "type": kind, "param": error.place, "code": code}}


def error_code(error: AdapterError) -> str:
    """Code of an error in the midst of a stream."""
    return _REFUSALS[error.kind][2] or "invalid_prompt"


def error_text(error: AdapterError) -> str:
    """The message, in words that clients know."""
    return f"{error.message}: {_OVERFLOW}" if error.kind == "context_overflow" else error.message


def chat_usage(usage: Usage) -> dict[str, Any]:
    """Token counts as Chat Completions names them."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }


def responses_usage(usage: Usage) -> dict[str, Any]:
    """Token counts as Responses names them."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }

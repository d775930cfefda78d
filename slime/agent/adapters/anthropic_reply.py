"""Anthropic Messages: the answer, as events while it is written or as one body.

Invariant: blocks come one after the other, each opened and closed once; the deltas of a block join to what
the whole body holds. A thinking block's signature and a call's id are minted here: every client sends them
back as they are. Knows no request but its model.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import Any

import orjson

from slime.agent.adapters.openai_body import read_arguments
from slime.agent.adapters.wire import AdapterError, Ending, ErrorKind, ModelRequest, ReplyWriter, Usage
from slime.agent.parsing.events import (
    OutputEvent,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
)
from slime.agent.template_fit import RAW_ARGUMENTS

# Closed: of all statuses Claude Code ends at once and for good only at 403 and 410.
_REFUSALS: dict[ErrorKind, tuple[int, str]] = {
    "authentication": (401, "authentication_error"),
    "invalid_request": (400, "invalid_request_error"),
    "context_overflow": (400, "invalid_request_error"),
    "rate_limit": (429, "rate_limit_error"),
    "overloaded": (529, "overloaded_error"),
    "upstream": (500, "api_error"),
    "not_found": (404, "not_found_error"),
    "too_large": (413, "request_too_large"),
    "closed": (403, "permission_error"),
}
# By these words Claude Code knows that it has to compact its history.
_OVERFLOW = "prompt is too long"
_DELTAS = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
}


def refusal(error: AdapterError) -> tuple[int, dict[str, Any]]:
    """Status and body of an error."""
    status, kind = _REFUSALS[error.kind]
    message = error.message
    if error.kind == "context_overflow" and not message.startswith(_OVERFLOW):
        message = f"{_OVERFLOW}: {message}"
    return status, {"type": "error", "error": {"type": kind, "message": message}}


@dataclass
class _Block:
    """A block of the answer: what its start says, and the pieces that its deltas gave."""

    head: dict[str, Any]
    pieces: list[str] = field(default_factory=list)
    signature: str = ""

    @property
    def kind(self) -> str:
        return str(self.head["type"])

    def body(self) -> dict[str, Any]:
        """The whole block."""
        said = "".join(self.pieces)
        if self.kind == "tool_use":
            return {**self.head, "input": _input(said)}
        signed = {"signature": self.signature} if self.kind == "thinking" else {}
        return {**self.head, self.kind: said, **signed}


def _input(arguments: str) -> dict[str, Any]:
    """Arguments for a body, where they must be an object: what is none stands in one, as it was sampled."""
    value = read_arguments(arguments)
    return {RAW_ARGUMENTS: value} if isinstance(value, str) else value


class AnthropicWriter(ReplyWriter):
    """One `message`. Arguments of calls leave as they are sampled, ill-formed ones too."""

    def __init__(self, request: ModelRequest) -> None:
        self.handles: list[str] = []
        self.tool_ids: list[str] = []
        self._blocks: list[_Block] = []
        self._open: _Block | None = None
        self._head: dict[str, Any] = {
            "id": _minted("msg"),
            "type": "message",
            "role": "assistant",
            "model": request.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
        }

    def begin(self, usage: Usage) -> bytes:
        return _sse("message_start", message={**self._head, "usage": _usage(usage)})

    def event(self, event: OutputEvent) -> bytes:
        match event:
            case ReasoningDelta(text):
                return self._written("thinking", text)
            case TextDelta(text):
                return self._written("text", text)
            case ToolCallStart(_, name):
                return self._close() + self._start_call(name)
            case ToolCallDelta(_, json):
                return self._delta(json)
            case ToolCallEnd():
                return self._close()

    def keepalive(self) -> bytes:
        return _sse("ping")

    def end(self, ending: Ending) -> bytes:
        """Close the answer; one that says nothing is an empty text."""
        closed = self._close() if self._blocks else self._start({"type": "text", "text": ""}) + self._close()
        delta = {"stop_reason": self._stop_reason(ending), "stop_sequence": self._stop_sequence(ending)}
        last = _sse("message_delta", delta=delta, usage=_usage(ending.usage))
        return closed + last + _sse("message_stop")

    def error(self, error: AdapterError) -> bytes:
        return _sse("error", error=refusal(error)[1]["error"])

    def whole(self, ending: Ending) -> dict[str, Any]:
        return {
            **self._head,
            "content": [block.body() for block in self._blocks],
            "stop_reason": self._stop_reason(ending),
            "stop_sequence": self._stop_sequence(ending),
            "usage": _usage(ending.usage),
        }

    def _stop_reason(self, ending: Ending) -> str:
        """An aborted answer is cut off as one that reached its limit is: neither was ended by the model."""
        if ending.finish_reason != "stop":
            return "max_tokens"
        if self.tool_ids:
            return "tool_use"
        return "stop_sequence" if ending.stop_sequence is not None else "end_turn"

    def _stop_sequence(self, ending: Ending) -> str | None:
        return ending.stop_sequence if self._stop_reason(ending) == "stop_sequence" else None

    def _written(self, kind: str, text: str) -> bytes:
        begun = b""
        if self._open is None or self._open.kind != kind:
            begun = self._close() + self._start({"type": kind, kind: ""})
        return begun + self._delta(text)

    def _start_call(self, name: str) -> bytes:
        self.tool_ids.append(self._handle("toolu"))
        return self._start({"type": "tool_use", "id": self.tool_ids[-1], "name": name, "input": {}})

    def _start(self, head: dict[str, Any]) -> bytes:
        self._open = _Block(head)
        self._blocks.append(self._open)
        shown = {**head, "signature": ""} if head["type"] == "thinking" else head
        return _sse("content_block_start", index=len(self._blocks) - 1, content_block=shown)

    def _delta(self, piece: str) -> bytes:
        if self._open is None:
            raise ValueError("a delta of a call that is not open")
        self._open.pieces.append(piece)
        kind, name = _DELTAS[self._open.kind]
        return _sse("content_block_delta", index=len(self._blocks) - 1, delta={"type": kind, name: piece})

    def _close(self) -> bytes:
        """Close the open block, if there is one; thinking is signed before."""
        block, self._open = self._open, None
        if block is None:
            return b""
        index, signed = len(self._blocks) - 1, b""
        if block.kind == "thinking":
            block.signature = self._handle("sig")
            delta = {"type": "signature_delta", "signature": block.signature}
            signed = _sse("content_block_delta", index=index, delta=delta)
        return signed + _sse("content_block_stop", index=index)

    def _handle(self, prefix: str) -> str:
        self.handles.append(_minted(prefix))
        return self.handles[-1]


def _minted(prefix: str) -> str:
    """A name that nobody can guess."""
    return f"{prefix}_{secrets.token_hex(12)}"


def _usage(usage: Usage) -> dict[str, Any]:
    """Token counts as Anthropic names them: cached tokens are no part of `input_tokens`."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_read_input_tokens": usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
    }


def _sse(kind: str, **data: Any) -> bytes:
    """One server-sent event."""
    return b"event: %s\ndata: %s\n\n" % (kind.encode(), orjson.dumps({"type": kind, **data}))

"""OpenAI Chat Completions: the answer, as chunks while it is written or as one body.

Invariant: the chunks' deltas join to exactly the message of the whole body; text, reasoning and arguments go
out as they were sampled. Knows no request but its model, whether it asked for usage, and what its client
makes of endings.
"""

from __future__ import annotations

import time
from typing import Any

from slime.agent.adapters.openai_shapes import DONE, ClientTraits, TurnIds, chat_usage, refusal, sse
from slime.agent.adapters.wire import AdapterError, Ending, ModelRequest, ReplyWriter, Usage
from slime.agent.parsing.events import OutputEvent, ReasoningDelta, TextDelta, ToolCallDelta, ToolCallStart


class ChatWriter(ReplyWriter):
    """One `chat.completion`. Every call of a turn is sent; clients answer all of them."""

    def __init__(self, request: ModelRequest) -> None:
        self._ids = TurnIds()
        self.handles = self._ids.minted
        self.tool_ids: list[str] = []
        self._head = {
            "id": f"chatcmpl-{TurnIds().mint('resp').removeprefix('resp_')}",
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": request.model,
        }
        self._include_usage: bool = request.extra["include_usage"]
        self._client: ClientTraits = request.extra["client"]
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[tuple[str, list[str]]] = []

    def begin(self, usage: Usage) -> bytes:
        return self._chunk({"role": "assistant", "content": ""})

    def event(self, event: OutputEvent) -> bytes:
        match event:
            case TextDelta(text):
                self._text.append(text)
                return self._chunk({"content": text})
            case ReasoningDelta(text):
                self._reasoning.append(text)
                return self._chunk({"reasoning_content": text})
            case ToolCallStart(index, name):
                self.tool_ids.append(self._ids.mint("call"))
                self._calls.append((name, []))
                return self._chunk(
                    {"tool_calls": [{"index": index, **_call(self.tool_ids[index], name, "")}]}
                )
            case ToolCallDelta(index, json):
                self._calls[index][1].append(json)
                return self._chunk({"tool_calls": [{"index": index, "function": {"arguments": json}}]})
        return b""

    def keepalive(self) -> bytes:
        return self._chunk({})

    def end(self, ending: Ending) -> bytes:
        last = self._chunk({}, self._finish(ending))
        if self._include_usage:
            last += sse({**self._head, "choices": [], "usage": chat_usage(ending.usage)})
        return last + DONE

    def error(self, error: AdapterError) -> bytes:
        """The error alone: without ``[DONE]`` no client takes what it got for a whole answer."""
        return b"" if self._client.is_better_cut(error) else sse(refusal(error)[1])

    def whole(self, ending: Ending) -> dict[str, Any]:
        choice = {
            "index": 0,
            "message": self._message(),
            "logprobs": None,
            "finish_reason": self._finish(ending),
        }
        head = {**self._head, "object": "chat.completion"}
        return {**head, "choices": [choice], "usage": chat_usage(ending.usage)}

    def _message(self) -> dict[str, Any]:
        text = "".join(self._text)
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if self._reasoning:
            message["reasoning_content"] = "".join(self._reasoning)
        if self._calls:
            message["content"] = text or None
            message["tool_calls"] = [
                _call(name, called, "".join(pieces))
                for name, (called, pieces) in zip(self.tool_ids, self._calls, strict=True)
            ]
        return message

    def _finish(self, ending: Ending) -> str:
        """An aborted answer is cut off as one that reached its limit is: neither was ended by the model."""
        if ending.finish_reason != "stop":
            return "length"
        return "tool_calls" if self._calls else "stop"

    def _chunk(self, delta: dict[str, Any], finish: str | None = None) -> bytes:
        return sse({**self._head, "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]})


def _call(name: str, called: str, arguments: str) -> dict[str, Any]:
    return {"id": name, "type": "function", "function": {"name": called, "arguments": arguments}}

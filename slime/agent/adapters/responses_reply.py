"""OpenAI Responses: the answer, as its full set of events while it is written or as one body.

Invariant: sequence numbers count up by one, every item that was added is done before the last event, and the
last event holds the body that a client gets which does not stream. Knows no request but its tools and what
its client makes of endings.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from slime.agent.adapters.openai_shapes import (
    ClientTraits,
    TurnIds,
    error_code,
    error_text,
    responses_usage,
    sse,
)
from slime.agent.adapters.responses_items import (
    CallItem,
    CustomCallItem,
    Event,
    FunctionCallItem,
    Item,
    TextItem,
)
from slime.agent.adapters.responses_tools import Route
from slime.agent.adapters.wire import AdapterError, Ending, ModelRequest, ReplyWriter, Usage
from slime.agent.parsing.events import (
    OutputEvent,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
)


@dataclass(frozen=True, kw_only=True)
class ReplyPlan:
    """What the writer has to know of the request.

    Attributes:
        routes: the client's tool by its canonical name.
    """

    routes: dict[str, Route] = field(default_factory=dict)
    client: ClientTraits = ClientTraits()


class ResponsesWriter(ReplyWriter):
    """One `response`."""

    def __init__(self, request: ModelRequest) -> None:
        self._plan: ReplyPlan = request.extra["reply"]
        self._ids = TurnIds()
        self.handles = self._ids.minted
        self.tool_ids: list[str] = []
        self._items: list[Item] = []
        self._text: TextItem | None = None
        self._calls: list[CallItem] = []
        self._sequence = 0
        self._head = {
            "id": self._ids.mint("resp"),
            "object": "response",
            "created_at": int(time.time()),
            "model": request.model,
            "parallel_tool_calls": request.parallel_tool_calls,
            "tool_choice": request.tool_choice if request.tool_choice in ("none", "required") else "auto",
            # A response repeats the request's tools; no client reads them there, and they can fill 50 kB.
            "tools": [],
            "max_output_tokens": request.max_tokens,
            "previous_response_id": request.continues,
        }

    def begin(self, usage: Usage) -> bytes:
        return self._send([self._lifecycle("created"), self._lifecycle("in_progress")])

    def event(self, event: OutputEvent) -> bytes:
        return self._send(self._told(event))

    def keepalive(self) -> bytes:
        """The one event that resets Codex's idle timer; comments do not."""
        return self._send([self._lifecycle("in_progress")])

    def end(self, ending: Ending) -> bytes:
        status = self._status(ending)
        # Without output an empty message is what names this turn in the next request.
        begun = [] if self._items else self._text_item("message")[1]
        events = [*begun, *self._close(status)]
        return self._send([*events, {"type": f"response.{status}", "response": self.whole(ending)}])

    def error(self, error: AdapterError) -> bytes:
        if self._plan.client.is_better_cut(error):
            return b""
        failure = {"code": error_code(error), "message": error_text(error)}
        response = {**self._response("failed"), "error": failure}
        return self._send([{"type": "response.failed", "response": response}])

    def whole(self, ending: Ending) -> dict[str, Any]:
        status = self._status(ending)
        response = {**self._response(status), "usage": responses_usage(ending.usage)}
        if status == "incomplete":
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        return response

    def _status(self, ending: Ending) -> str:
        is_whole = ending.finish_reason == "stop" or self._plan.client.ends_at_incomplete
        return "completed" if is_whole else "incomplete"

    def _response(self, status: str) -> dict[str, Any]:
        output = [item.body() for item in self._items]
        nothing = {"error": None, "incomplete_details": None, "usage": None}
        return {**self._head, "status": status, "output": output, **nothing}

    def _lifecycle(self, kind: str) -> Event:
        """Where the answer stands; its items are told by their own events."""
        response = {**self._response("in_progress"), "output": []}
        return {"type": f"response.{kind}", "response": response}

    def _told(self, event: OutputEvent) -> Sequence[Event]:
        match event:
            case ReasoningDelta(text):
                return self._written("reasoning", text)
            case TextDelta(text):
                return self._written("message", text)
            case ToolCallStart(_, name):
                return [*self._close("completed"), *self._call(name)]
            case ToolCallDelta(index, json):
                return self._calls[index].delta(json)
            case ToolCallEnd(index, arguments):
                return self._calls[index].finish(arguments)

    def _written(self, kind: str, text: str) -> list[Event]:
        item, begun = self._text_item(kind)
        return [*begun, *item.delta(text)]

    def _text_item(self, kind: str) -> tuple[TextItem, list[Event]]:
        """The message or reasoning that is open, or else a new one and the events of its beginning."""
        if self._text is not None and self._text.head["type"] == kind:
            return self._text, []
        closed = self._close("completed")
        if kind == "reasoning":
            head = {"id": self._ids.mint("rs"), "type": kind, "summary": []}
            head["encrypted_content"] = self._ids.mint("enc")
        else:
            head = {"id": self._ids.mint("msg"), "type": kind, "role": "assistant"}
        self._text = TextItem(
            len(self._items), head, "reasoning_text" if kind == "reasoning" else "output_text"
        )
        self._items.append(self._text)
        return self._text, [*closed, *self._text.added()]

    def _close(self, status: str) -> list[Event]:
        closing, self._text = self._text, None
        return closing.done(status) if closing else []

    def _call(self, name: str) -> list[Event]:
        route = self._plan.routes.get(name) or Route("function", "", name)
        call_id = self._ids.mint("call")
        self.tool_ids.append(call_id)
        head = {"call_id": call_id, "name": route.name}
        if route.namespace:
            head["namespace"] = route.namespace
        item: CallItem
        if route.kind == "custom":
            item = CustomCallItem(
                len(self._items), {"id": self._ids.mint("ctc"), "type": "custom_tool_call", **head}
            )
        else:
            item = FunctionCallItem(
                len(self._items), {"id": self._ids.mint("fc"), "type": "function_call", **head}
            )
        self._items.append(item)
        self._calls.append(item)
        return item.added()

    def _send(self, events: Sequence[Event]) -> bytes:
        sent = []
        for event in events:
            sent.append(sse({**event, "sequence_number": self._sequence}, event["type"]))
            self._sequence += 1
        return b"".join(sent)

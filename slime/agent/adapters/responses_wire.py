"""OpenAI Responses: a body of `/v1/responses` in the common form.

Invariant: a request that goes on from an earlier response carries only its new messages; what came before,
instructions among it, is the session's. Sampling parameters are not read. Knows neither the items of a
history (`responses_request`) nor those of an answer (`responses_reply`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slime.agent.adapters.openai_body import Fields, invalid
from slime.agent.adapters.openai_shapes import ClientTraits, refusal
from slime.agent.adapters.responses_reply import ReplyPlan, ResponsesWriter
from slime.agent.adapters.responses_request import messages_of
from slime.agent.adapters.responses_tools import ToolTable
from slime.agent.adapters.traffic import origin_of
from slime.agent.adapters.translations import Translations
from slime.agent.adapters.wire import AdapterError, ModelRequest, WireProtocol
from slime.agent.messages import Message

_NEEDS_STORAGE = ("conversation", "prompt")


class ResponsesWire(WireProtocol):
    """The protocol of Codex, the OpenAI SDKs' `responses`, openai-agents, and opencode's openai provider."""

    def translate(
        self, body: Mapping[str, Any], headers: Mapping[str, str], known: Translations | None = None
    ) -> ModelRequest:
        fields = Fields(body)
        _check_supported(fields)
        table = ToolTable(fields.objects("tools"))
        choice, tools = table.choice(fields)
        said, references = messages_of(fields, table)
        messages = [*_instructions(fields), *said]
        if not messages:
            raise invalid("input", "text or at least one item is required")
        max_tokens = fields.count("max_output_tokens")
        return ModelRequest(
            messages=messages,
            tools=tools,
            model=fields.optional_text("model") or ModelRequest.model,
            stream=fields.flag("stream", False),
            max_tokens=max_tokens,
            tool_choice=choice,
            parallel_tool_calls=fields.flag("parallel_tool_calls", True),
            continues=fields.optional_text("previous_response_id") or None,
            references=references,
            origin=origin_of(
                headers,
                messages=messages,
                tools=table.tools,
                wants_json=_wants_json(fields),
                max_tokens=max_tokens,
            ),
            extra={"reply": ReplyPlan(routes=table.routes, client=ClientTraits.of(headers))},
        )

    def writer(self, request: ModelRequest) -> ResponsesWriter:
        return ResponsesWriter(request)

    def error(self, error: AdapterError) -> tuple[int, dict[str, Any]]:
        return refusal(error)


def _check_supported(fields: Fields) -> None:
    for name in _NEEDS_STORAGE:
        if fields.value.get(name) is not None:
            raise invalid(name, "is not stored here; send the items in `input`")
    if fields.flag("background", False):
        raise invalid("background", "an answer is given while the client waits, not later")


def _instructions(fields: Fields) -> list[Message]:
    """A leading system message; a chain that goes on has it already."""
    said = fields.optional_text("instructions")
    goes_on = fields.value.get("previous_response_id")
    return [{"role": "system", "content": said}] if said and not goes_on else []


def _wants_json(fields: Fields) -> bool:
    shape = fields.object("text")
    form = shape.object("format") if shape else None
    return form is not None and form.text("type") != "text"

"""Anthropic Messages: a body of `/v1/messages` or its `count_tokens` in the common form.

Invariant: whatever JSON comes in, it gives a request or an `AdapterError` that names the field. A client's
sampling parameters and thinking budget are not read: they belong to the session. An output format is not
enforced; it only tells side requests. Knows nothing of messages' and answers' inner form.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from slime.agent.adapters.anthropic_reply import AnthropicWriter, refusal
from slime.agent.adapters.anthropic_request import messages_of
from slime.agent.adapters.anthropic_tools import choice_of, tools_of
from slime.agent.adapters.openai_body import Fields, invalid
from slime.agent.adapters.traffic import origin_of
from slime.agent.adapters.translations import Translations
from slime.agent.adapters.wire import AdapterError, ModelRequest, WireProtocol


class AnthropicWire(WireProtocol):
    """The protocol of Claude Code, the Anthropic SDKs, and opencode's and litellm's Anthropic providers."""

    def translate(
        self, body: Mapping[str, Any], headers: Mapping[str, str], known: Translations | None = None
    ) -> ModelRequest:
        """The request in the common form.

        `extra["deferred_tools"]` holds the schemas of tools that are not in the prompt's list but can be
        loaded in mid-conversation: a parser of calls needs them besides `tools`.
        """
        fields = Fields(body)
        tools = tools_of(fields)
        if not fields.items("messages"):
            raise invalid("messages", "at least one is required")
        messages = messages_of(fields, tools, known or Translations())
        choice, parallel = choice_of(fields, tools)
        max_tokens = fields.count("max_tokens")
        offered = [*tools.shown, *tools.deferred.values()]
        return ModelRequest(
            messages=messages,
            tools=tools.shown,
            model=fields.optional_text("model") or ModelRequest.model,
            stream=fields.flag("stream", False),
            max_tokens=max_tokens,
            stop=_stop(fields),
            tool_choice=choice,
            parallel_tool_calls=parallel,
            origin=origin_of(
                headers,
                messages=messages,
                tools=offered,
                wants_json=_wants_json(fields),
                max_tokens=max_tokens,
            ),
            extra={"deferred_tools": list(tools.deferred.values())},
        )

    def writer(self, request: ModelRequest) -> AnthropicWriter:
        return AnthropicWriter(request)

    def error(self, error: AdapterError) -> tuple[int, dict[str, Any]]:
        return refusal(error)


def _stop(fields: Fields) -> Sequence[str]:
    stops = fields.items("stop_sequences")
    for index, stop in enumerate(stops):
        if not isinstance(stop, str) or not stop:
            raise invalid(f"stop_sequences[{index}]", "expected text that is not empty")
    return stops


def _wants_json(fields: Fields) -> bool:
    """Whether an output format is asked for; `output_format` is its name in older betas."""
    config = fields.object("output_config")
    form = (config.object("format") if config else None) or fields.object("output_format")
    return form is not None and form.optional_text("type") == "json_schema"

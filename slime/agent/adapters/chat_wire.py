"""OpenAI Chat Completions: a body of `/v1/chat/completions` in the common form.

Invariant: a turn that a client sends back gives the same message whether its content is null or empty, text
or parts, its arguments re-serialised or not. A client's sampling parameters are not read: they belong to the
session. Knows nothing of the answer's form (`chat_reply`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from slime.agent.adapters.chat_reply import ChatWriter
from slime.agent.adapters.openai_body import Fields, function_tool, invalid
from slime.agent.adapters.openai_shapes import ClientTraits, refusal
from slime.agent.adapters.traffic import origin_of
from slime.agent.adapters.translations import Translations
from slime.agent.adapters.wire import AdapterError, ModelRequest, WireProtocol
from slime.agent.messages import Message


class ChatWire(WireProtocol):
    """The protocol of the OpenAI SDKs' `chat.completions`, qwen-code, opencode, litellm and many more."""

    def translate(
        self, body: Mapping[str, Any], headers: Mapping[str, str], known: Translations | None = None
    ) -> ModelRequest:
        fields = Fields(body)
        _check_supported(fields)
        known = known or Translations()
        messages = [
            translated
            for given in fields.objects("messages")
            for translated in known.of(given.value, partial(_messages, given))
        ]
        if not messages:
            raise invalid("messages", "at least one is required")
        messages = _without_broken(messages)
        offered = [_tool(tool) for tool in fields.objects("tools")]
        choice, tools = _tool_choice(fields, offered)
        max_tokens = fields.count("max_completion_tokens") or fields.count("max_tokens")
        options, form = fields.object("stream_options"), fields.object("response_format")
        wants_json = form is not None and form.text("type") != "text"
        return ModelRequest(
            messages=messages,
            tools=tools,
            model=fields.optional_text("model") or ModelRequest.model,
            stream=fields.flag("stream", False),
            max_tokens=max_tokens,
            stop=_stop(fields),
            tool_choice=choice,
            parallel_tool_calls=fields.flag("parallel_tool_calls", True),
            origin=origin_of(
                headers, messages=messages, tools=offered, wants_json=wants_json, max_tokens=max_tokens
            ),
            extra={
                "include_usage": options is not None and options.flag("include_usage", False),
                "client": ClientTraits.of(headers),
            },
        )

    def writer(self, request: ModelRequest) -> ChatWriter:
        return ChatWriter(request)

    def error(self, error: AdapterError) -> tuple[int, dict[str, Any]]:
        return refusal(error)


def _check_supported(fields: Fields) -> None:
    if (fields.count("n") or 1) > 1:
        raise invalid("n", "only one answer a request is given; send the request again for another")
    if fields.items("functions"):
        raise invalid("functions", "is not supported; describe them in `tools`")


def _stop(fields: Fields) -> Sequence[str]:
    value = fields.value.get("stop")
    stops = [value] if isinstance(value, str) else fields.items("stop")
    for index, stop in enumerate(stops):
        if not isinstance(stop, str) or not stop:
            raise invalid(f"stop[{index}]", "expected text that is not empty")
    return stops


def _messages(fields: Fields) -> list[Message]:
    return [_message(fields)]


def _message(fields: Fields) -> Message:
    role = fields.text("role")
    if role in ("system", "developer"):
        return {"role": "system", "content": fields.plain_content("content")}
    if role == "user":
        return {"role": "user", "content": fields.content("content")}
    if role == "assistant":
        return _assistant(fields)
    if role == "tool":
        return {
            "role": "tool",
            "tool_call_id": fields.text("tool_call_id"),
            "content": fields.content("content"),
        }
    if role == "function":
        return {"role": "tool", "name": fields.text("name"), "content": fields.content("content")}
    raise invalid(fields.at("role"), f"unknown role {role!r}")


def _without_broken(messages: list[Message]) -> list[Message]:
    """The history without answers that broke off: opencode leaves them empty before the one that it got."""
    following = [*(message["role"] for message in messages[1:]), ""]
    return [
        message
        for message, next_role in zip(messages, following, strict=True)
        if not (message["role"] == next_role == "assistant" and _is_empty(message))
    ]


def _is_empty(message: Message) -> bool:
    return not message["content"] and "tool_calls" not in message


def _assistant(fields: Fields) -> Message:
    content = fields.plain_content("content") or fields.optional_text("refusal") or ""
    message: Message = {"role": "assistant", "content": content}
    reasoning = fields.optional_text("reasoning_content") or fields.optional_text("reasoning")
    if reasoning:
        message["reasoning_content"] = reasoning
    calls = [_tool_call(call) for call in fields.objects("tool_calls")]
    legacy = fields.object("function_call")
    if legacy:
        calls.append({"type": "function", "function": _called(legacy)})
    if calls:
        message["tool_calls"] = calls
    return message


def _tool_call(fields: Fields) -> dict[str, Any]:
    function = fields.object("function")
    if function is None:
        raise invalid(fields.at("function"), "is required; calls of other types are not supported")
    return {"id": fields.text("id"), "type": "function", "function": _called(function)}


def _called(function: Fields) -> dict[str, Any]:
    return {"name": function.text("name"), "arguments": function.arguments("arguments")}


def _tool(fields: Fields) -> dict[str, Any]:
    function = fields.object("function")
    if function is None:
        raise invalid(fields.at("function"), "is required; tools of other types are not supported")
    return function_tool(function, function.text("name"))


def _tool_choice(fields: Fields, tools: list[dict[str, Any]]) -> tuple[str, list[dict[str, Any]]]:
    """The choice, and the tools that it leaves."""
    value = fields.value.get("tool_choice")
    choice = value if isinstance(value, str) or value is None else Fields(value, "tool_choice")
    if isinstance(choice, Fields):
        if choice.optional_text("type") == "allowed_tools":
            return _allowed_tools(choice, tools)
        return _named(choice, tools), tools
    if choice not in (None, "auto", "none", "required"):
        raise invalid("tool_choice", f"must be auto, none, required or a function, not {choice!r}")
    if choice == "required" and not tools:
        raise invalid("tool_choice", "a call is required, but there are no `tools`")
    return choice or "auto", tools


def _named(choice: Fields, tools: list[dict[str, Any]]) -> str:
    function = choice.object("function")
    if function is None:
        raise invalid(choice.at("function"), "is required; choices of other types are not supported")
    name = function.text("name")
    if all(tool["function"]["name"] != name for tool in tools):
        raise invalid(function.at("name"), f"{name!r} is not among the `tools`")
    return name


def _allowed_tools(choice: Fields, tools: list[dict[str, Any]]) -> tuple[str, list[dict[str, Any]]]:
    allowed = choice.object("allowed_tools") or choice
    mode = allowed.text("mode")
    if mode not in ("auto", "required"):
        raise invalid(allowed.at("mode"), f"must be auto or required, not {mode!r}")
    names = {_named(tool, tools) for tool in allowed.objects("tools")}
    return mode, [tool for tool in tools if tool["function"]["name"] in names]

"""Anthropic Messages: the messages of a body in the common form.

Invariant: a message that a client sends again gives the same message, wherever its cache marks moved, whether
its text stands in a block or alone. Nothing that a block says is dropped; a block that cannot be told to a
model is refused by name. Knows no session: what names an earlier turn is listed, not looked up.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import orjson

from slime.agent.adapters.anthropic_tools import ClientTools, definition_text, tool_of
from slime.agent.adapters.openai_body import Fields, can_be_written, invalid
from slime.agent.adapters.translations import Translations
from slime.agent.messages import HANDLES, Message
from slime.agent.template_fit import RAW_ARGUMENTS

Part: TypeAlias = dict[str, Any]
_Reader: TypeAlias = Callable[[Fields, ClientTools], list[Part]]

# Claude Code puts it first among the system blocks; its hash changes in mid-session.
_BILLING = "x-anthropic-billing-header:"
# Claude Code 2.1.332 sends arguments that are no JSON object back in this form, cut at 2048 UTF-16 units.
_UNPARSED = "__unparsedToolInput"
_SERVER_CALLS = ("server_tool_use", "mcp_tool_use")
_UNREADABLE = ("encrypted", "cache_control", "caller", "citations")


def messages_of(fields: Fields, tools: ClientTools, known: Translations) -> list[Message]:
    """The messages of a body, its `system` first.

    Args:
        known: what messages of this session were translated to.

    Raises:
        AdapterError: ``invalid_request``, naming the field, as ``messages[3].content[0].type``.
    """
    messages = _system(fields, "system", tools)
    context = hash(orjson.dumps(tools.deferred)) if tools.deferred else 0
    for given in fields.objects("messages"):
        messages += known.of(given.value, partial(_message, given, tools), context=context)
    return messages


def _message(fields: Fields, tools: ClientTools) -> list[Message]:
    role = fields.text("role")
    if role == "user":
        return _user(fields, tools)
    if role == "assistant":
        return [_assistant(fields, tools)]
    if role == "system":
        return _system(fields, "content", tools)
    raise invalid(fields.at("role"), f"must be user, assistant or system, not {role!r}")


def _system(fields: Fields, name: str, tools: ClientTools) -> list[Message]:
    """A system message, or none where nothing is said."""
    parts = _parts(_blocks(fields, name), tools, _IN_SYSTEM)
    texts = [_without_billing(part["text"]) for part in parts]
    text = "\n".join(text for text in texts if text)
    return [{"role": "system", "content": text}] if text else []


def _without_billing(text: str) -> str:
    return text.partition("\n")[2] if text.startswith(_BILLING) else text


def _user(fields: Fields, tools: ClientTools) -> list[Message]:
    """The tool results as messages of their own, then what else the user says."""
    blocks = _blocks(fields, "content")
    results = [block for block in blocks if block.value.get("type") == "tool_result"]
    rest = [block for block in blocks if block.value.get("type") != "tool_result"]
    content = _content(_parts(rest, tools, _IN_USER))
    messages = [_tool(block, tools) for block in results]
    return [*messages, {"role": "user", "content": content}] if content or not messages else messages


def _tool(block: Fields, tools: ClientTools) -> Message:
    parts = _parts(_blocks(block, "content"), tools, _IN_RESULT)
    if block.flag("is_error", False):
        parts = _as_error(parts)
    return {"role": "tool", "tool_call_id": block.text("tool_use_id"), "content": _content(parts)}


def _as_error(parts: list[Part]) -> list[Part]:
    """The parts, with a word for the error where they do not begin with one."""
    first = parts[0].get("text", "") if parts else ""
    if first.startswith(("Error", "<tool_use_error>")):
        return parts
    return [_text(f"Error: {first}" if first else "Error"), *parts[1 if first else 0 :]]


def _assistant(fields: Fields, tools: ClientTools) -> Message:
    texts: list[str] = []
    reasoning: list[str] = []
    handles: list[str | None] = []
    calls: list[dict[str, Any]] = []
    for block in _blocks(fields, "content"):
        kind = block.text("type")
        if kind == "thinking":
            reasoning.append(_required(block, "thinking"))
            handles.append(block.optional_text("signature"))
        elif kind == "redacted_thinking":
            handles.append(block.text("data"))
        elif kind == "tool_use":
            calls.append(_call(block))
        elif kind in _SERVER_CALLS or kind.endswith("_tool_result"):
            texts.append(_server_text(block))
        else:
            texts += [part["text"] for part in _parts([block], tools, _IN_ASSISTANT)]
    message: Message = {"role": "assistant", "content": _joined(texts)}
    given = [handle for handle in handles if handle]
    extras = {"reasoning_content": _joined(reasoning), "tool_calls": calls, HANDLES: given}
    return message | {name: value for name, value in extras.items() if value}


def _call(block: Fields) -> dict[str, Any]:
    function = {"name": block.text("name"), "arguments": _arguments(block)}
    return {"id": block.text("id"), "type": "function", "function": function}


def _arguments(block: Fields) -> dict[str, Any] | str:
    """The arguments; as sampled where they are no JSON object: Claude Code 2.1.332 sends JSON of other kinds
    back as it is, and other text in a form of its own; `anthropic_reply` wraps both."""
    value = block.value.get("input")
    if isinstance(value, str | int | float | list) and can_be_written(value):
        return orjson.dumps(value).decode()
    given = block.json_object("input")
    if given.keys() == {RAW_ARGUMENTS} and isinstance(given[RAW_ARGUMENTS], str):
        return str(given[RAW_ARGUMENTS])
    unparsed = given.get(_UNPARSED) if len(given) == 1 else None
    raw = unparsed.get("raw") if isinstance(unparsed, dict) else None
    if isinstance(unparsed, dict) and isinstance(raw, str):
        is_whole = len(raw.encode("utf-16-le")) // 2 == unparsed.get("len")
        return raw if is_whole else given
    return given


def _server_text(block: Fields) -> str:
    """Work of a server's tool, which no template has a place for, as text."""
    try:
        orjson.dumps(block.value)
    except orjson.JSONEncodeError as error:
        raise invalid(block.path, "is nested too deeply") from error
    shown = {name: value for name, value in block.value.items() if name not in ("type", "id", "tool_use_id")}
    return f"[{block.text('type')}] {orjson.dumps(_readable(shown)).decode()}"


def _readable(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _readable(item) for name, item in value.items() if not name.startswith(_UNREADABLE)}
    return [_readable(item) for item in value] if isinstance(value, list) else value


def _blocks(fields: Fields, name: str) -> list[Fields]:
    """The blocks of a content; text alone is a block of text."""
    value = fields.value.get(name)
    if isinstance(value, str):
        return [Fields({"type": "text", "text": value}, within=(fields, name, None))]
    return fields.objects(name)


def _parts(blocks: list[Fields], tools: ClientTools, readers: dict[str, _Reader]) -> list[Part]:
    return [part for block in blocks for part in _read(block, tools, readers)]


def _read(block: Fields, tools: ClientTools, readers: dict[str, _Reader]) -> list[Part]:
    kind = block.text("type")
    if kind not in readers:
        raise invalid(block.at("type"), f"blocks of type {kind!r} are not supported here")
    return readers[kind](block, tools)


def _content(parts: list[Part]) -> str | list[Part]:
    """Text, or where there are images a list of ``text`` and ``image_url`` parts."""
    said = [part for part in parts if part["type"] != "text" or part["text"]]
    if all(part["type"] == "text" for part in said):
        return _joined([part["text"] for part in said])
    return said


def _joined(texts: list[str]) -> str:
    return "\n".join(text for text in texts if text)


def _text(text: str) -> Part:
    return {"type": "text", "text": text}


def _required(block: Fields, name: str) -> str:
    """A text that must be there and may be empty."""
    value = block.optional_text(name)
    if value is None:
        raise invalid(block.at(name), "is required")
    return value


def _source(block: Fields) -> tuple[str, Fields]:
    source = block.object("source")
    if source is None:
        raise invalid(block.at("source"), "is required")
    return source.text("type"), source


def _read_text(block: Fields, tools: ClientTools) -> list[Part]:
    return [_text(_required(block, "text"))]


def _read_image(block: Fields, tools: ClientTools) -> list[Part]:
    kind, source = _source(block)
    if kind == "base64":
        url = f"data:{source.text('media_type')};base64,{source.text('data')}"
    elif kind == "url":
        url = source.text("url")
    else:
        raise invalid(source.at("type"), f"images of type {kind!r} are not supported; send them as base64")
    return [{"type": "image_url", "image_url": {"url": url}}]


def _read_document(block: Fields, tools: ClientTools) -> list[Part]:
    kind, source = _source(block)
    if kind == "text":
        parts = [_text(_required(source, "data"))]
    elif kind == "content":
        parts = _parts(_blocks(source, "content"), tools, _IN_DOCUMENT)
    else:
        raise invalid(source.at("type"), f"documents of type {kind!r} cannot be read; send their text")
    heads = [block.optional_text("title"), block.optional_text("context")]
    return [*(_text(head) for head in heads if head), *parts]


def _read_search_result(block: Fields, tools: ClientTools) -> list[Part]:
    head = f"{_required(block, 'title')} ({_required(block, 'source')})"
    return [_text(head), *_parts(_blocks(block, "content"), tools, _IN_DOCUMENT)]


def _read_tool_reference(block: Fields, tools: ClientTools) -> list[Part]:
    return [_text(tools.loaded(block.text("tool_name")))]


def _changed_tool(block: Fields) -> Fields:
    tool = block.object("tool")
    if tool is None:
        raise invalid(block.at("tool"), "is required")
    return tool


def _read_tool_addition(block: Fields, tools: ClientTools) -> list[Part]:
    tool = _changed_tool(block)
    definition = tool.object("definition")
    if definition is None:
        return [_text(tools.loaded(tool.text("name")))]
    defined = tool_of(definition)
    return [_text(definition_text(defined))] if defined else []


def _read_tool_removal(block: Fields, tools: ClientTools) -> list[Part]:
    return [_text(f"Tool removed: {_changed_tool(block).text('name')}")]


_IN_ASSISTANT: dict[str, _Reader] = {"text": _read_text}
_IN_SYSTEM: dict[str, _Reader] = {
    "text": _read_text,
    "tool_addition": _read_tool_addition,
    "tool_removal": _read_tool_removal,
}
_IN_DOCUMENT: dict[str, _Reader] = {"text": _read_text, "image": _read_image}
_IN_USER: dict[str, _Reader] = {
    **_IN_DOCUMENT,
    "document": _read_document,
    "search_result": _read_search_result,
}
_IN_RESULT: dict[str, _Reader] = {**_IN_USER, "tool_reference": _read_tool_reference}

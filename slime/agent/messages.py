"""The message form that every protocol is translated into, and what identifies a message in a history.

A message is a dict as chat templates take it: ``role`` (system, user, assistant, tool), ``content`` (text, or
a list of parts where images are passed through), for the assistant ``reasoning_content`` and ``tool_calls``
(``{"id", "type": "function", "function": {"name", "arguments": dict}}``), for a tool ``tool_call_id``.
Besides, ``handles`` lists what this server minted for the message and the client sent back. Knows no
protocol.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import orjson

Message: TypeAlias = dict[str, Any]

HANDLES = "handles"
TOOLS_ROLE = "tools"
"""Role of the message that begins a history and holds its tools: with other tools it is another one."""


def handles_of(message: Mapping[str, Any]) -> tuple[str, ...]:
    """Server-minted names that the message carries: its own handles, and the ids of its tool calls."""
    calls = message.get("tool_calls") or ()
    ids = (call.get("id") for call in calls if isinstance(call, Mapping))
    return (*message.get(HANDLES, ()), *(name for name in ids if name))


def template_message(message: Mapping[str, Any]) -> Message:
    """The message without what only this server needs."""
    return {name: value for name, value in message.items() if name != HANDLES}


def match_key(message: Mapping[str, Any]) -> int:
    """A hash that two messages share when they say the same; handles and tool call ids do not count.

    Text counts without surrounding white space, an assistant message without its reasoning: clients trim the
    one and drop the other. The hash is keyed anew in each process.
    """
    content = message.get("content") or ""
    said = content.strip() if isinstance(content, str) else _written(content)
    calls = message.get("tool_calls")
    return hash((message.get("role"), said, tuple(map(_call_key, calls)) if calls else ()))


def _call_key(call: Mapping[str, Any]) -> tuple[Any, bytes]:
    function = call.get("function") or {}
    return function.get("name"), _written(function.get("arguments"))


def _written(value: Any) -> bytes:
    return orjson.dumps(value, option=orjson.OPT_SORT_KEYS, default=str)

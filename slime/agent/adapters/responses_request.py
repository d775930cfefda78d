"""OpenAI Responses: the items of a request as messages.

Invariant: the items of one sampled turn become one assistant message that carries every handle of theirs,
whichever of them a client kept, dropped or set between the outputs of the turn's calls. Knows nothing of
tokens or sessions.
"""

from __future__ import annotations

import logging
from typing import Any

from slime.agent.adapters.openai_body import Fields, invalid
from slime.agent.adapters.openai_shapes import stem_of
from slime.agent.adapters.responses_tools import Route, ToolTable
from slime.agent.messages import HANDLES, Message

logger = logging.getLogger(__name__)

# Work of hosted tools, which no model of ours asked for and no template can show.
_HOSTED = frozenset(
    f"{tool}_{part}"
    for tool, parts in {
        "web_search": ("call",),
        "file_search": ("call",),
        "code_interpreter": ("call",),
        "image_generation": ("call",),
        "computer": ("call", "call_output"),
        "mcp": ("call", "list_tools", "approval_request", "approval_response"),
        "tool_search": ("call", "output"),
    }.items()
    for part in parts
)
_OUTPUTS = frozenset({"function_call_output", "custom_tool_call_output", "local_shell_call_output"})


def messages_of(fields: Fields, tools: ToolTable) -> tuple[list[Message], list[str]]:
    """The messages that `input` gives, and the ids of items in it that are sent by their ids alone.

    Raises:
        AdapterError: ``invalid_request``, naming the item, as ``input[3].type``.
    """
    value = fields.value.get("input")
    if isinstance(value, str):
        return [{"role": "user", "content": value}], []
    history = _History(tools)
    for item in fields.objects("input"):
        history.add(item)
    history.leave_out_unfinished()
    return history.messages, history.references


class _History:
    """Messages so far, and the turn whose items may still come."""

    def __init__(self, tools: ToolTable) -> None:
        self.messages: list[Message] = []
        self.references: list[str] = []
        self._tools = tools
        self._turn: Message | None = None
        self._stem: str | None = None

    def add(self, item: Fields) -> None:
        kind = item.optional_text("type") or "message"
        if kind == "message":
            self._message(item)
        elif kind == "reasoning":
            self._reasoning(item)
        elif kind in ("function_call", "custom_tool_call", "local_shell_call"):
            self._call(item, kind)
        elif kind in _OUTPUTS:
            self._output(item)
        elif kind == "item_reference":
            self._assistant(item.text("id"))
            self.references.append(item.text("id"))
        elif kind in _HOSTED:
            logger.debug("%s: an item of type %r is passed over: it is a hosted tool's", item.path, kind)
        else:
            raise invalid(item.at("type"), f"items of type {kind!r} are not supported")

    def leave_out_unfinished(self) -> None:
        """Drop a turn of ours that nothing but the next answer may follow.

        Where a stream is cut, Codex asks again with the items that it got, and keeps them before the new
        answer's.
        """
        if self._turn is not None and self._stem is not None and self.messages[-1] is self._turn:
            logger.debug("the items of an answer that broke off are passed over")
            self.messages.pop()
            self._turn = self._stem = None

    def _message(self, item: Fields) -> None:
        role = item.text("role")
        if role == "assistant":
            text = item.plain_content("content")
            message = self._assistant(item.optional_text("id"))
            message["content"] = "\n".join(said for said in (message["content"], text) if said)
        elif role == "user":
            self._close({"role": "user", "content": item.content("content")})
        elif role in ("system", "developer"):
            self._close({"role": "system", "content": item.plain_content("content")})
        else:
            raise invalid(item.at("role"), f"unknown role {role!r}")

    def _reasoning(self, item: Fields) -> None:
        parts = item.objects("content") or item.objects("summary")
        text = "\n".join(said for part in parts if (said := part.optional_text("text")))
        message = self._assistant(item.optional_text("id"), item.optional_text("encrypted_content"))
        if text:
            known = message.get("reasoning_content")
            message["reasoning_content"] = f"{known}\n{text}" if known else text

    def _call(self, item: Fields, kind: str) -> None:
        call_id = item.text("call_id")
        name, arguments = self._called(item, kind)
        message = self._assistant(item.optional_text("id"), stem_from=call_id)
        call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        message.setdefault("tool_calls", []).append(call)

    def _called(self, item: Fields, kind: str) -> tuple[str, dict[str, Any] | str]:
        if kind == "local_shell_call":
            return "local_shell", item.arguments("action")
        namespace, name = item.optional_text("namespace") or "", item.text("name")
        if kind == "custom_tool_call":
            said = item.optional_text("input") or ""
            return self._tools.canonical(Route("custom", namespace, name)), {"input": said}
        return self._tools.canonical(Route("function", namespace, name)), item.arguments("arguments")

    def _output(self, item: Fields) -> None:
        """The output of a call; a local shell's has the call's name in its own id."""
        call_id = item.optional_text("call_id") or item.text("id")
        self.messages.append({"role": "tool", "tool_call_id": call_id, "content": item.content("output")})

    def _assistant(self, *handles: str | None, stem_from: str | None = None) -> Message:
        """The message of the turn that an item with these handles belongs to."""
        given = [handle for handle in handles if handle]
        stem = next((found for handle in (*given, stem_from) if (found := stem_of(handle))), None)
        message = self._joined(stem)
        if message is None:
            if stem is not None:
                self.leave_out_unfinished()
            message = {"role": "assistant", "content": ""}
            self.messages.append(message)
            self._stem = None
        self._turn, self._stem = message, stem or self._stem
        if given:
            message.setdefault(HANDLES, []).extend(given)
        return message

    def _joined(self, stem: str | None) -> Message | None:
        """The open turn, if an item of this stem can be of it; behind outputs only a known stem can tell."""
        if self._turn is None:
            return None
        if self.messages[-1] is self._turn:
            return self._turn if stem is None or self._stem in (None, stem) else None
        return self._turn if stem is not None and stem == self._stem else None

    def _close(self, message: Message) -> None:
        self.messages.append(message)
        self._turn = self._stem = None

"""Anthropic Messages: the tools that a request offers, and which of them the model may call.

Invariant: tools that a client loads later do not change the list that opens the prompt; their definitions
stand where they were loaded. Tools that Anthropic's servers would run are left out: nobody runs them here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from slime.agent.adapters.openai_body import Fields, invalid

# Types of tools, without their dates, that are run by the server.
_SERVER_TOOLS = ("web_search", "web_fetch", "code_execution", "tool_search_tool", "mcp_toolset", "advisor")
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


@dataclass(frozen=True)
class ClientTools:
    """The client's tools as function schemas.

    Attributes:
        shown: those of the prompt.
        deferred: by name, those that a ``tool_reference`` loads (``defer_loading``).
    """

    shown: list[dict[str, Any]]
    deferred: Mapping[str, dict[str, Any]]

    def loaded(self, name: str) -> str:
        """What tells the model that it can call a tool from here on, with the definition where it is new."""
        return definition_text(self.deferred[name]) if name in self.deferred else f"Tool loaded: {name}"

    def has(self, name: str) -> bool:
        """Whether the client offers the tool."""
        return name in self.deferred or any(tool["function"]["name"] == name for tool in self.shown)


def definition_text(tool: Mapping[str, Any]) -> str:
    """A tool's definition, for the midst of a conversation."""
    return f"Tool loaded: {orjson.dumps(tool).decode()}"


def tools_of(fields: Fields) -> ClientTools:
    """The tools of a body.

    Raises:
        AdapterError: ``invalid_request``, naming the tool, as ``tools[3].name``.
    """
    shown: list[dict[str, Any]] = []
    deferred: dict[str, dict[str, Any]] = {}
    for given in fields.objects("tools"):
        tool = tool_of(given)
        if tool is None:
            continue
        if given.flag("defer_loading", False):
            deferred[tool["function"]["name"]] = tool
        else:
            shown.append(tool)
    return ClientTools(shown, deferred)


def tool_of(fields: Fields) -> dict[str, Any] | None:
    """A tool as a function schema; None for one that the server would run.

    Raises:
        AdapterError: ``invalid_request``: it is malformed, or its type has no schema of ours.
    """
    kind = fields.optional_text("type")
    if kind not in (None, "custom") and fields.value.get("input_schema") is None:
        if kind.startswith(_SERVER_TOOLS):
            return None
        raise invalid(
            fields.at("type"), f"tools of type {kind!r} are not supported; give the tool an input_schema"
        )
    function = {
        "name": fields.text("name"),
        "description": fields.optional_text("description") or "",
        "parameters": fields.json_object("input_schema") or {"type": "object", "properties": {}},
    }
    return {"type": "function", "function": function}


def choice_of(fields: Fields, tools: ClientTools) -> tuple[str, bool]:
    """`ModelRequest.tool_choice`, and whether calls may be parallel.

    Raises:
        AdapterError: ``invalid_request``: no such choice, or it names a tool that is not there.
    """
    choice = fields.object("tool_choice")
    if choice is None:
        return "auto", True
    kind, parallel = choice.text("type"), not choice.flag("disable_parallel_tool_use", False)
    if kind == "tool":
        name = choice.text("name")
        if not tools.has(name):
            raise invalid(choice.at("name"), f"{name!r} is not among the `tools`")
        return name, parallel
    if kind not in _CHOICES:
        raise invalid(choice.at("type"), f"must be auto, any, tool or none, not {kind!r}")
    if kind == "any" and not tools.shown:
        raise invalid("tool_choice", "a call is required, but there are no `tools`")
    return _CHOICES[kind], parallel

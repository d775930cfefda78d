"""The tools of a Responses request under names that a model can call, and the way back to the client's own.

Invariant: canonical names are unique, and each leads to one tool of the client: a function, a function in a
namespace, or a custom tool, whose free text is the one argument ``input``. Hosted tools have no one to run
them and are left out.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from slime.agent.adapters.openai_body import Fields, function_tool, invalid

logger = logging.getLogger(__name__)

ToolKind: TypeAlias = Literal["function", "custom"]
_CALLABLE: dict[str, ToolKind] = {"function": "function", "custom": "custom"}


@dataclass(frozen=True)
class Route:
    """A client's tool: its kind, the namespace that it stands in (empty: none), and its name there."""

    kind: ToolKind
    namespace: str
    name: str


class ToolTable:
    """The tools of one request.

    Attributes:
        tools: in canonical form, in the client's order.
        routes: the client's tool by its canonical name.
    """

    def __init__(self, fields: Sequence[Fields]) -> None:
        self.tools: list[dict[str, Any]] = []
        self.routes: dict[str, Route] = {}
        self._names: dict[Route, str] = {}
        # A plain function keeps its name whatever else is called so.
        self._taken = {str(tool.value.get("name")) for tool in fields if tool.value.get("type") == "function"}
        for tool in fields:
            self._add(tool)

    def canonical(self, route: Route) -> str:
        """What the model calls a tool, the request's or one of earlier days."""
        return self._names.get(route) or _plain_name(route)

    def choice(self, fields: Fields) -> tuple[str, list[dict[str, Any]]]:
        """The request's `tool_choice`, and the tools that it leaves."""
        value = fields.value.get("tool_choice")
        if isinstance(value, Mapping):
            choice = Fields(value, "tool_choice")
            return (
                self._allowed(choice)
                if value.get("type") == "allowed_tools"
                else (self._named(choice), self.tools)
            )
        if value not in (None, "auto", "none", "required"):
            raise invalid("tool_choice", f"must be auto, none, required or a tool, not {value!r}")
        if value == "required" and not self.tools:
            raise invalid("tool_choice", "a call is required, but there are no `tools` that can be called")
        return value or "auto", self.tools

    def _add(self, tool: Fields, namespace: str = "", about: str = "") -> None:
        kind = tool.text("type")
        if kind == "namespace" and not namespace:
            self._add_namespace(tool)
        elif kind in _CALLABLE:
            self._add_callable(tool, Route(_CALLABLE[kind], namespace, tool.text("name")), about)
        else:
            logger.debug("%s: a tool of type %r is left out: nothing here can run it", tool.path, kind)

    def _add_namespace(self, tool: Fields) -> None:
        """What is said of the namespace is said with its first tool."""
        about = tool.optional_text("description") or ""
        for index, nested in enumerate(tool.objects("tools")):
            self._add(nested, tool.text("name"), "" if index else about)

    def _add_callable(self, tool: Fields, route: Route, about: str) -> None:
        name = self._names.get(route) or self._unique(route)
        self._names[route], self.routes[name] = name, route
        self.tools.append(
            _custom(tool, name, about) if route.kind == "custom" else function_tool(tool, name, about)
        )

    def _unique(self, route: Route) -> str:
        name = _plain_name(route)
        if route != Route("function", "", name):
            while name in self._taken:
                name += "_"
        self._taken.add(name)
        return name

    def _named(self, choice: Fields) -> str:
        kind = choice.text("type")
        if kind not in _CALLABLE:
            raise invalid(choice.at("type"), f"a choice of type {kind!r} is not supported")
        route = Route(_CALLABLE[kind], choice.optional_text("namespace") or "", choice.text("name"))
        if route not in self._names:
            raise invalid(choice.at("name"), f"{route.name!r} is not among the `tools`")
        return self._names[route]

    def _allowed(self, choice: Fields) -> tuple[str, list[dict[str, Any]]]:
        mode = choice.text("mode")
        if mode not in ("auto", "required"):
            raise invalid(choice.at("mode"), f"must be auto or required, not {mode!r}")
        names = {self._named(tool) for tool in choice.objects("tools")}
        return mode, [tool for tool in self.tools if tool["function"]["name"] in names]


def _plain_name(route: Route) -> str:
    return f"{route.namespace}.{route.name}" if route.namespace else route.name


def _custom(tool: Fields, name: str, about: str) -> dict[str, Any]:
    """A custom tool as a function of one text; its grammar, which nothing enforces, is told to the model."""
    form = tool.object("format")
    grammar = form.optional_text("definition") if form else None
    if form and grammar:
        syntax = form.optional_text("syntax") or "formal"
        about = f"{about}\n\nThe input follows this {syntax} grammar:\n{grammar}".strip()
    shown = function_tool(tool, name, about)
    shown["function"]["parameters"] = {
        "type": "object",
        "properties": {"input": {"type": "string"}},
        "required": ["input"],
    }
    return shown

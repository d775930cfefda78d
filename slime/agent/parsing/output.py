"""Where a format writes what it has read: events for the stream, and the whole output.

Invariants: white space at the ends of reasoning and of text is never given, that within is verbatim (also
around a call that stands between two texts); the deltas of a well-formed call join to its arguments.
Knows no format.
"""

from __future__ import annotations

from typing import Any, Literal

import orjson

from slime.agent.parsing.events import (
    OutputEvent,
    ParsedModelOutput,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
)


def json_object(text: str) -> dict[str, Any] | None:
    """The object that `text` is the JSON of, or None."""
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        return None
    return value if isinstance(value, dict) else None


class _Trimmed:
    """Text without the white space at its ends."""

    def __init__(self) -> None:
        self.given: list[str] = []
        self._space: list[str] = []

    def add(self, text: str) -> str:
        """What may be given now that `text` has come."""
        body = text.rstrip()
        space = text[len(body) :]
        if not self.given:
            body = body.lstrip()
        if body:
            body = "".join((*self._space, body))
            self.given.append(body)
            self._space = []
        if self.given and space:
            self._space.append(space)
        return body


class Output:
    """The output so far.

    Attributes:
        ill_formed: markers that did not match, or a call that is malformed or cut off, were met.
        calls: number of calls begun.
    """

    def __init__(self) -> None:
        self.ill_formed = False
        self.calls = 0
        self._reasoning = _Trimmed()
        self._text = _Trimmed()
        self._arguments: list[str] = []
        self._tool_uses: list[dict[str, Any]] = []
        self._events: list[OutputEvent] = []
        self._kind: Literal["reasoning", "text", "arguments"] = "text"
        self._pieces: list[str] = []

    @property
    def has_text(self) -> bool:
        """Whether a visible character was given as text."""
        return bool(self._text.given)

    @property
    def is_empty(self) -> bool:
        """Whether nothing at all was given."""
        return not (self._text.given or self._reasoning.given or self.calls)

    def reasoning(self, text: str) -> None:
        """More of the reasoning."""
        self._delta("reasoning", self._reasoning.add(text))

    def text(self, text: str) -> None:
        """More visible text."""
        self._delta("text", self._text.add(text))

    def flag(self) -> None:
        """Mark the output as ill-formed."""
        self.ill_formed = True

    def call(self, name: str) -> None:
        """A call begins."""
        self._flush()
        self._arguments = []
        self._events.append(ToolCallStart(self.calls, name))
        self._tool_uses.append({"name": name, "input": ""})
        self.calls += 1

    def arguments(self, text: str) -> None:
        """More of the call's arguments, as JSON."""
        self._arguments.append(text)
        self._delta("arguments", text)

    def end(self, *, cut: bool = False, sampled: str | None = None) -> None:
        """The call ends: ill-formed if `cut`, if `sampled` replaces its JSON, or if that is no object."""
        self._flush()
        arguments = "".join(self._arguments) if sampled is None else sampled
        value = json_object(arguments)
        ill_formed = cut or sampled is not None or value is None
        self.ill_formed |= ill_formed
        self._tool_uses[-1]["input"] = arguments if ill_formed else value
        self._events.append(ToolCallEnd(self.calls - 1, arguments, ill_formed))

    def drain(self) -> list[OutputEvent]:
        """The events since the last time, neighbouring deltas of a kind joined."""
        self._flush()
        events, self._events = self._events, []
        return events

    def result(self) -> ParsedModelOutput:
        """Everything that was given."""
        return ParsedModelOutput(
            reasoning="".join(self._reasoning.given),
            text="".join(self._text.given),
            tool_uses=self._tool_uses,
            ill_formed=self.ill_formed,
        )

    def _delta(self, kind: Literal["reasoning", "text", "arguments"], text: str) -> None:
        if not text:
            return
        if kind != self._kind:
            self._flush()
            self._kind = kind
        self._pieces.append(text)

    def _flush(self) -> None:
        text, self._pieces = "".join(self._pieces), []
        if not text:
            return
        if self._kind == "arguments":
            self._events.append(ToolCallDelta(self.calls - 1, text))
        else:
            self._events.append(ReasoningDelta(text) if self._kind == "reasoning" else TextDelta(text))

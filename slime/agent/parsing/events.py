"""What a model's output is made of, in the order in which it is written.

Invariant: the events of an output are the same however its text was cut into pieces, up to joining
neighbouring deltas of one kind. Knows no format and no protocol.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeAlias


@dataclass(frozen=True)
class ReasoningDelta:
    """More of the reasoning; never empty."""

    text: str


@dataclass(frozen=True)
class TextDelta:
    """More of the visible text; never empty. White space at the ends of a text is never given."""

    text: str


@dataclass(frozen=True)
class ToolCallStart:
    """A tool call begins: its number in the output, and the tool's name."""

    index: int
    name: str


@dataclass(frozen=True)
class ToolCallDelta:
    """More of the arguments as JSON text; the deltas of a call join to `ToolCallEnd.arguments`."""

    index: int
    json: str


@dataclass(frozen=True)
class ToolCallEnd:
    """A tool call is complete.

    Attributes:
        arguments: JSON text of an object; if `ill_formed`, what was sampled, as it is.
        ill_formed: the arguments are no JSON object, or the call was cut off.
    """

    index: int
    arguments: str
    ill_formed: bool = False


OutputEvent: TypeAlias = ReasoningDelta | TextDelta | ToolCallStart | ToolCallDelta | ToolCallEnd


@dataclass(kw_only=True)
class ParsedModelOutput:
    """A whole output.

    Attributes:
        reasoning: text of the reasoning, without its markers and surrounding white space.
        text: visible text, stripped.
        tool_uses: ``{"name", "input"}`` of each call; `input` is the object of arguments, or the sampled
            text where it is none.
        ill_formed: a call was malformed or cut off, or markers did not match.
    """

    reasoning: str = ""
    text: str = ""
    tool_uses: list[dict[str, Any]] = field(default_factory=list)
    ill_formed: bool = False

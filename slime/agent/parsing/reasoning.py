"""The forms in which models mark their reasoning; knows how, not when, they are read."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ReasoningFormat:
    """Markers of reasoning.

    Attributes:
        opening, closing: around the reasoning.
        forced: an output begins within the reasoning, with or without its opening.
        ends: openings of tool calls that end the reasoning too, where the family is trained to do so; for the
            others a call within the reasoning is reasoning.
    """

    opening: str = "<think>"
    closing: str = "</think>"
    forced: bool = False
    ends: tuple[str, ...] = ()


_THINK = ReasoningFormat()
_FORCED = ReasoningFormat(forced=True)

REASONING_FORMATS: dict[str, ReasoningFormat] = {
    "qwen3": _THINK,
    "qwen3-thinking": _FORCED,
    "interns1": _THINK,
    "nemotron_3": _THINK,
    "deepseek-r1": _FORCED,
    "deepseek-v3": _THINK,
    "step3": _FORCED,
    "glm45": ReasoningFormat(ends=("<tool_call>",)),
    "kimi": ReasoningFormat(opening="◁think▷", closing="◁/think▷"),
    "kimi_k2": ReasoningFormat(ends=("<|tool_calls_section_begin|>",)),
    "mistral": ReasoningFormat(opening="[THINK]", closing="[/THINK]"),
}

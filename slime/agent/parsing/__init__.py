"""Parsers of model outputs: reasoning, visible text and tool calls, incremental and whole.

`OutputParser` gives events as the output arrives, `parse_model_output` the whole at once; both know the
formats by SGLang's names, and `detect_parsers` finds the names for a chat template. Knows no tokens.
"""

from slime.agent.parsing.events import (
    OutputEvent,
    ParsedModelOutput,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
)
from slime.agent.parsing.parser import OutputParser
from slime.agent.parsing.reasoning import REASONING_FORMATS
from slime.agent.parsing.registry import TOOL_FORMATS, detect_parsers
from slime.agent.parsing.whole import parse_model_output

__all__ = [
    "REASONING_FORMATS",
    "TOOL_FORMATS",
    "OutputEvent",
    "OutputParser",
    "ParsedModelOutput",
    "ReasoningDelta",
    "TextDelta",
    "ToolCallDelta",
    "ToolCallEnd",
    "ToolCallStart",
    "detect_parsers",
    "parse_model_output",
]

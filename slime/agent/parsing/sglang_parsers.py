"""SGLang's own parsers behind our form, where SGLang is installed; imported on first use.

Whole outputs only: in a stream SGLang's parsers lose text that is cut within a marker. Invariants: a failure
of theirs is logged and answered with None, so that ours can be used; where they read no call, all is text.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

from slime.agent.parsing.events import ParsedModelOutput
from slime.agent.parsing.output import json_object

logger = logging.getLogger(__name__)

_FAILURES = (ValueError, TypeError, LookupError, AttributeError, RuntimeError, AssertionError)
_CLOSING = "</think>"


def parse_with_sglang(
    raw: str, *, tools: Sequence[Mapping[str, Any]], tool_parser: str | None, reasoning_parser: str | None
) -> ParsedModelOutput | None:
    """The output by SGLang's parsers; None if SGLang is absent, does not know a name, or fails."""
    modules = _modules()
    if modules is None or tool_parser is reasoning_parser is None:
        return None
    calls, reasoning, protocol = modules
    knows_tool = tool_parser is None or tool_parser in calls.FunctionCallParser.ToolCallParserEnum
    if not knows_tool or not (
        reasoning_parser is None or reasoning_parser in reasoning.ReasoningParser.DetectorMap
    ):
        return None
    try:
        parser = None
        if tool_parser is not None:
            schemas = [protocol.Tool.model_validate(tool) for tool in tools]
            parser = calls.FunctionCallParser(schemas, tool_parser)
        thought, text = "", raw
        if reasoning_parser is not None:
            thought, text = _split(reasoning.ReasoningParser, reasoning_parser, raw, parser)
        rest, items = parser.parse_non_stream(text) if parser is not None else (text, [])
    except _FAILURES:
        logger.warning(
            "SGLang's parsers %s and %s failed; ours are used", tool_parser, reasoning_parser, exc_info=True
        )
        return None
    return _parsed(thought, rest if items else text, items)


def _split(kind: Any, name: str, raw: str, calls: Any) -> tuple[str, str]:
    """Reasoning and the rest; a closing marker before any call that nothing opened ends reasoning too."""
    thought, text = kind(model_type=name, stream_reasoning=False).parse_non_stream(raw)
    before, marker, after = (text or "").partition(_CLOSING)
    if marker and not thought and not (calls is not None and calls.has_tool_call(before)):
        return before, after
    return thought or "", text or ""


def _parsed(thought: str, text: str, items: Sequence[Any]) -> ParsedModelOutput:
    uses, ill_formed = [], False
    for item in items:
        value = json_object(item.parameters)
        ill_formed |= value is None
        uses.append({"name": item.name, "input": item.parameters if value is None else value})
    return ParsedModelOutput(
        reasoning=thought.strip(), text=text.strip(), tool_uses=uses, ill_formed=ill_formed
    )


@functools.cache
def _modules() -> tuple[ModuleType, ModuleType, ModuleType] | None:
    try:
        return (
            importlib.import_module("sglang.srt.function_call.function_call_parser"),
            importlib.import_module("sglang.srt.parser.reasoning_parser"),
            importlib.import_module("sglang.srt.entrypoints.openai.protocol"),
        )
    except ImportError as error:
        if error.name != "sglang":
            logger.warning("SGLang's parsers cannot be imported (%s); ours are used", error)
        return None

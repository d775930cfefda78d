"""A whole output at once: by SGLang's parsers where they are installed and know the names, else by ours.

Invariant: what is neither reasoning nor a call is text; where SGLang's parsers lose some of it, ours are
used. Knows no format itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from slime.agent.parsing.events import ParsedModelOutput
from slime.agent.parsing.parser import OutputParser
from slime.agent.parsing.registry import is_known
from slime.agent.parsing.schema import parameters_by_tool
from slime.agent.parsing.sglang_parsers import parse_with_sglang


def parse_model_output(
    raw: str,
    *,
    tools_schema: Sequence[Mapping[str, Any]] | None,
    tool_parser_name: str | None,
    reasoning_parser_name: str | None,
) -> ParsedModelOutput:
    """Parse a decoded output, its special tokens kept and its stop token removed.

    Reasoning that was closed before any call but not opened in the output was opened by the prompt. Without
    tools no call is looked for. Where the named parser finds no call, calls of known tools in Qwen3-Coder's
    form are taken.

    Args:
        tools_schema: OpenAI's function schemas.

    Raises:
        ConfigError: a parser's name that neither SGLang (if installed) nor we know.
    """
    tools = tuple(tools_schema or ())
    tool_parser = tool_parser_name if tools else None
    parsed = parse_with_sglang(
        raw, tools=tools, tool_parser=tool_parser, reasoning_parser=reasoning_parser_name
    )
    if parsed is None or is_known(tool_parser, reasoning_parser_name):
        own = _parse(raw, tools=tools, tool_parser=tool_parser, reasoning_parser=reasoning_parser_name)
        parsed = own if parsed is None or _loses(parsed, own) else parsed
    if tool_parser is None or parsed.tool_uses:
        return parsed
    tagged = _parse(parsed.text, tools=tools, tool_parser="qwen3_coder", reasoning_parser=None)
    if not tagged.tool_uses or {use["name"] for use in tagged.tool_uses} - parameters_by_tool(tools).keys():
        return parsed
    tagged.reasoning = parsed.reasoning
    return tagged


def _loses(parsed: ParsedModelOutput, own: ParsedModelOutput) -> bool:
    """Whether calls or visible text that ours finds are missing: SGLang drops text behind calls, for one."""
    kept, found = ((len(out.tool_uses), len("".join(out.text.split()))) for out in (parsed, own))
    return kept[0] < found[0] or (kept[0] == found[0] and kept[1] < found[1])


def _parse(
    raw: str,
    *,
    tools: Sequence[Mapping[str, Any]],
    tool_parser: str | None,
    reasoning_parser: str | None,
    opens_reasoning: bool = False,
) -> ParsedModelOutput:
    parser = OutputParser(
        tool_parser=tool_parser,
        reasoning_parser=reasoning_parser,
        tools=tools,
        opens_reasoning=opens_reasoning,
    )
    parser.feed(raw)
    parser.finish()
    if not parser.unopened or opens_reasoning:
        return parser.result
    return _parse(
        raw,
        tools=tools,
        tool_parser=tool_parser,
        reasoning_parser=reasoning_parser,
        opens_reasoning=True,
    )

"""The names of formats, as SGLang has them, and what a chat template tells about a model's formats.

Invariant: a name that is not known raises; it never means "no parser".
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from slime.agent.parsing.formats import ToolFormat
from slime.agent.parsing.json_calls import (
    DeepSeekV3Calls,
    DeepSeekV31Calls,
    KimiCalls,
    MistralCalls,
    ObjectCalls,
)
from slime.agent.parsing.reasoning import REASONING_FORMATS, ReasoningFormat
from slime.agent.parsing.schema import parameters_by_tool
from slime.agent.parsing.tag_calls import DEEPSEEK_V32, GLM, QWEN3_CODER, TagCalls
from slime.errors import ConfigError

Tools: TypeAlias = Sequence[Mapping[str, Any]]


def _hermes(tools: Tools) -> ToolFormat:
    return ObjectCalls("<tool_call>", "</tool_call>")


def _llama3(tools: Tools) -> ToolFormat:
    return ObjectCalls("<|python_tag|>", bare_open="{", known=frozenset(parameters_by_tool(tools)))


def _glm(tools: Tools) -> ToolFormat:
    return TagCalls(GLM, tools)


_DEEPSEEK_MARKERS = (
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
)
_KIMI_MARKERS = (
    "<|tool_call_begin|>",
    "<|tool_call_end|>",
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
)
TOOL_FORMATS: dict[str, Callable[[Tools], ToolFormat]] = {
    "qwen": _hermes,
    "qwen25": _hermes,
    "hermes": _hermes,
    "qwen3_coder": lambda tools: TagCalls(QWEN3_CODER, tools),
    "deepseekv3": lambda tools: DeepSeekV3Calls(*_DEEPSEEK_MARKERS),
    "deepseekv31": lambda tools: DeepSeekV31Calls(*_DEEPSEEK_MARKERS),
    "deepseekv32": lambda tools: TagCalls(DEEPSEEK_V32, tools),
    "glm": _glm,
    "glm45": _glm,
    "glm47": _glm,
    "llama3": _llama3,
    "kimi_k2": lambda tools: KimiCalls(*_KIMI_MARKERS),
    "mistral": lambda tools: MistralCalls(),
}

# The first marker of a format that a template's source contains tells the format.
_TOOL_MARKS = (
    ("｜DSML｜", "deepseekv32"),
    ("<|tool_calls_section_begin|>", "kimi_k2"),
    ("<arg_key>", "glm45"),
    ("<function=", "qwen3_coder"),
    ("[TOOL_CALLS]", "mistral"),
    ("<|python_tag|>", "llama3"),
    ('"parameters": dictionary of argument name', "llama3"),
    ("<tool_call>", "qwen"),
)


def tool_format(name: str, tools: Tools) -> ToolFormat:
    """The format called `name`.

    Raises:
        ConfigError: there is none; names the nearest.
    """
    if name not in TOOL_FORMATS:
        raise _unknown("tool_parser", name, TOOL_FORMATS)
    return TOOL_FORMATS[name](tools)


def reasoning_format(name: str) -> ReasoningFormat:
    """The format called `name`.

    Raises:
        ConfigError: there is none; names the nearest.
    """
    if name not in REASONING_FORMATS:
        raise _unknown("reasoning_parser", name, REASONING_FORMATS)
    return REASONING_FORMATS[name]


def is_known(tool_parser: str | None, reasoning_parser: str | None) -> bool:
    """Whether both names are ours; None is."""
    return tool_parser in (None, *TOOL_FORMATS) and reasoning_parser in (None, *REASONING_FORMATS)


def detect_parsers(chat_template: str) -> tuple[str | None, str | None]:
    """Names of the tool and reasoning parser for models with this template (its source); None where it
    tells of none."""
    tool = next((name for mark, name in _TOOL_MARKS if mark in chat_template), None)
    if tool is None and "<｜tool▁call▁begin｜>" in chat_template:
        tool = "deepseekv3" if "```json" in chat_template else "deepseekv31"
    return tool, _detect_reasoning(chat_template, tool)


def _detect_reasoning(template: str, tool: str | None) -> str | None:
    if "◁think▷" in template:
        return "kimi"
    if "[THINK]" in template:
        return "mistral"
    if "</think>" not in template:
        return None
    if "<｜Assistant｜>" in template:
        return "deepseek-v3" if "thinking" in template else "deepseek-r1"
    return {"kimi_k2": "kimi_k2", "glm45": "glm45"}.get(tool or "", "qwen3")


def _unknown(field: str, name: str, known: Iterable[str]) -> ConfigError:
    names = sorted(known)
    nearest = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean {nearest[0]!r}? " if nearest else ""
    return ConfigError(
        f"{field} {name!r} is not known", place=field, remedy=f"{hint}Known: {', '.join(names)}"
    )

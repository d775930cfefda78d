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
    "deepseekv4": lambda tools: TagCalls(DEEPSEEK_V32, tools),
    "glm": _glm,
    "glm45": _glm,
    "glm47": _glm,
    "llama3": _llama3,
    "kimi_k2": lambda tools: KimiCalls(*_KIMI_MARKERS),
    "mistral": lambda tools: MistralCalls(),
}

# A template is of the first format all of whose marks its source has, and none of the others.
_TEMPLATE_MARKS: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
    ("deepseekv32", ("｜DSML｜",), ()),
    ("deepseekv3", ("<｜tool▁call▁begin｜>", "```json"), ()),
    ("deepseekv31", ("<｜tool▁call▁begin｜>",), ()),
    ("kimi_k2", ("<|tool_calls_section_begin|>",), ()),
    ("glm45", ("<tool_call>", "<arg_key>"), ()),
    ("qwen3_coder", ("<tool_call>", "<function="), ()),
    ("mistral", ("[TOOL_CALLS]",), ()),
    ("llama3", ("<|python_tag|>",), ("<function=",)),
    ("llama3", ('"parameters": dictionary of argument name',), ()),
    ("qwen", ("<tool_call>", "</tool_call>"), ("<tool_calls>", "<invoke")),
)
_REASONING_MARKS = (
    ("kimi", "◁/think▷", ""),
    ("mistral", "[/THINK]", ""),
    ("kimi_k2", "</think>", "<|tool_calls_section_begin|>"),
    ("glm45", "</think>", "<arg_key>"),
    ("deepseek-v3", "</think>", "<｜Assistant｜>"),
    ("qwen3", "</think>", ""),
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
    """Names of the tool and reasoning parser for models with this template (its source); None where it tells
    of none.

    No format that begins within reasoning is given: whether an output does so, the rendered prompt tells.
    """
    tools = (
        name
        for name, marks, others in _TEMPLATE_MARKS
        if all(mark in chat_template for mark in marks) and not any(mark in chat_template for mark in others)
    )
    reasoning = (
        name for name, closing, mark in _REASONING_MARKS if closing in chat_template and mark in chat_template
    )
    return next(tools, None), next(reasoning, None)


def _unknown(field: str, name: str, known: Iterable[str]) -> ConfigError:
    names = sorted(known)
    nearest = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean {nearest[0]!r}? " if nearest else ""
    return ConfigError(
        f"{field} {name!r} is not known", place=field, remedy=f"{hint}Known: {', '.join(names)}"
    )

"""How the call that a client demands is begun for the model, in each format.

What is begun for it belongs to the prompt: it was not sampled and is not trained. Knows no tokens.
"""

from __future__ import annotations

_HERMES = ("<tool_call>\n", '{{"name": "{name}", "arguments":')
_GLM = ("<tool_call>", "{name}\n")
_OPENINGS: dict[str, tuple[str, str]] = {
    "qwen": _HERMES,
    "qwen25": _HERMES,
    "hermes": _HERMES,
    "qwen3_coder": ("<tool_call>\n<function=", "{name}>\n"),
    "deepseekv3": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>",
        "{name}\n```json\n",
    ),
    "deepseekv31": ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>", "{name}<｜tool▁sep｜>"),
    "glm": _GLM,
    "glm45": _GLM,
    "glm47": _GLM,
    "llama3": ('{{"name": "', '{name}", "parameters":'),
    "kimi_k2": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.",
        "{name}:0<|tool_call_argument_begin|>",
    ),
}


def call_opening(tool_parser: str | None, name: str | None) -> str | None:
    """The text that begins a call of the tool `name`, or of any; None where the format has no such text."""
    if tool_parser not in _OPENINGS:
        return None
    start, rest = _OPENINGS[tool_parser]
    return (start if name is None else start + rest).format(name=name)

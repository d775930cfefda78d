"""How each family of models writes its calls: the inverse of the parsers, for tests."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "edit",
            "parameters": {
                "type": "object",
                "properties": {
                    "text": {"type": "string"},
                    "count": {"type": "integer"},
                    "ratio": {"type": "number"},
                    "flag": {"type": "boolean"},
                    "items": {"type": "array"},
                    "options": {"$ref": "#/$defs/options"},
                    "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                },
                "$defs": {"options": {"type": "object"}},
            },
        },
    },
    {"type": "function", "function": {"name": "ls", "parameters": {}}},
]


@dataclass
class Family:
    """A format: `render` writes neighbouring calls; `typed` formats need the tool's schema."""

    render: Callable
    markers: tuple
    typed: bool = False
    after: tuple = ()
    rule_breakers: tuple = field(default=())


def objects(opening, closing="", key="arguments", joiner="", wrap="{}"):
    def render(calls, dumps):
        if wrap == "{}":
            return joiner.join(opening + dumps({"name": n, key: a}) + closing for n, a in calls)
        return opening + wrap % joiner.join(dumps({"name": n, key: a}) for n, a in calls) + closing

    return render


def each(before, between, after, section=("", ""), numbered=False):
    def render(calls, dumps):
        body = "".join(
            before + name + (f":{i}" if numbered else "") + between + dumps(arguments) + after
            for i, (name, arguments) in enumerate(calls)
        )
        return section[0] + body + section[1]

    return render


def scalar(value):
    return value if isinstance(value, str) else json.dumps(value)


def qwen3_coder(calls, dumps):
    def parameter(key, value):
        return f"<parameter={key}>\n{scalar(value)}\n</parameter>\n"

    return "".join(
        f"<tool_call>\n<function={n}>\n{''.join(parameter(*kv) for kv in a.items())}</function>\n</tool_call>"
        for n, a in calls
    )


def glm(calls, dumps):
    def parameter(key, value):
        return f"<arg_key>{key}</arg_key>\n<arg_value>{scalar(value)}</arg_value>\n"

    return "".join(
        f"<tool_call>{n}\n{''.join(parameter(*kv) for kv in a.items())}</tool_call>" for n, a in calls
    )


def deepseek_v32(calls, dumps):
    def parameter(key, value):
        kind = "true" if isinstance(value, str) else "false"
        return f'<｜DSML｜parameter name="{key}" string="{kind}">{scalar(value)}</｜DSML｜parameter>\n'

    body = "".join(
        f'<｜DSML｜invoke name="{n}">\n{"".join(parameter(*kv) for kv in a.items())}</｜DSML｜invoke>'
        for n, a in calls
    )
    return f"<｜DSML｜function_calls>{body}</｜DSML｜function_calls>"


_DEEPSEEK = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_KIMI = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")

FAMILIES = {
    "qwen": Family(objects("<tool_call>\n", "\n</tool_call>"), ("<tool_call>", "</tool_call>")),
    "hermes": Family(objects("<tool_call>", "</tool_call>"), ("<tool_call>", "</tool_call>")),
    "llama3": Family(
        objects("<|python_tag|>", key="parameters", joiner="; ", wrap="%s"),
        ("<|python_tag|>",),
        after=tuple(",;{"),
    ),
    "mistral": Family(objects("[TOOL_CALLS] ", joiner=", ", wrap="[%s]"), ("[TOOL_CALLS]",)),
    "mistral-named": Family(each("[TOOL_CALLS]", "[ARGS]", ""), ("[TOOL_CALLS]",)),
    "mistral-plain": Family(each("[TOOL_CALLS]", "", ""), ("[TOOL_CALLS]",)),
    "deepseekv3": Family(
        each(
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
            "\n```json\n",
            "\n```<｜tool▁call▁end｜>",
            _DEEPSEEK,
        ),
        ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", *_DEEPSEEK),
    ),
    "deepseekv31": Family(
        each("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", _DEEPSEEK),
        ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", *_DEEPSEEK),
    ),
    "kimi_k2": Family(
        each(
            "<|tool_call_begin|>functions.",
            "<|tool_call_argument_begin|>",
            "<|tool_call_end|>",
            _KIMI,
            numbered=True,
        ),
        ("<|tool_call_begin|>", "<|tool_call_end|>", *_KIMI),
    ),
    "qwen3_coder": Family(
        qwen3_coder,
        ("<tool_call>", "</tool_call>", "<function="),
        typed=True,
        rule_breakers=(r"</parameter>\s*(<parameter=|</function>|$)",),
    ),
    "glm45": Family(
        glm,
        ("<tool_call>", "</tool_call>"),
        typed=True,
        rule_breakers=(r"</arg_value>\s*(<arg_key>|</tool_call>|$)",),
    ),
    "deepseekv32": Family(
        deepseek_v32,
        ("<｜DSML｜invoke", "<｜DSML｜function_calls>", "</｜DSML｜function_calls>"),
        typed=True,
        rule_breakers=(r"</｜DSML｜parameter>\s*(<｜DSML｜parameter name=|</｜DSML｜invoke>|$)",),
    ),
}


def parser_name(family):
    return family.split("-")[0]

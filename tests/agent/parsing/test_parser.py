"""Particular outputs: what streams when, what models get wrong, what marks reasoning."""

import pytest

from slime.agent.parsing import (
    OutputParser,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
    detect_parsers,
)
from slime.errors import ConfigError
from tests.agent.parsing.families import TOOLS


def parse(raw, tool_parser="qwen", reasoning_parser="qwen3", **settings):
    parser = OutputParser(tool_parser=tool_parser, reasoning_parser=reasoning_parser, tools=TOOLS, **settings)
    events = parser.feed(raw) + parser.finish()
    return events, parser.result


def test_arguments_leave_as_they_are_sampled():
    parser = OutputParser(tool_parser="qwen", reasoning_parser=None, tools=TOOLS)
    assert parser.feed('<tool_call>\n{"name": "edit", "argu') == [ToolCallStart(0, "edit")]
    assert parser.feed('ments": {"text": "a') == [ToolCallDelta(0, '{"text": "a')]
    assert parser.feed(" b</tool_") == [ToolCallDelta(0, " b</tool_")]
    assert parser.feed('call>"}') == [ToolCallDelta(0, 'call>"}')]
    assert parser.feed("}") == [ToolCallEnd(0, '{"text": "a b</tool_call>"}')]
    assert parser.feed("\n</tool_call>") == []


def test_string_parameters_between_tags_leave_as_they_are_sampled():
    parser = OutputParser(tool_parser="qwen3_coder", reasoning_parser=None, tools=TOOLS)
    parser.feed("<tool_call>\n<function=edit>\n<parameter=text>")
    assert parser.feed('\nsay "hi"\n') == [ToolCallDelta(0, '"text": "say \\"hi\\"')]
    assert parser.feed("x") == [ToolCallDelta(0, "\\nx")]
    assert parser.feed("\n</parameter>\n<parameter=count>\n1") == [ToolCallDelta(0, '", "count": ')]
    assert parser.feed("2\n</parameter>\n</function") == []
    assert parser.feed(">\n</tool_call>") == [
        ToolCallDelta(0, "12}"),
        ToolCallEnd(0, '{"text": "say \\"hi\\"\\nx", "count": 12}'),
    ]


def test_a_string_that_may_be_null_streams_once_it_is_not():
    parser = OutputParser(tool_parser="glm45", reasoning_parser=None, tools=TOOLS)
    parser.feed("<tool_call>edit\n<arg_key>maybe</arg_key>\n")
    assert parser.feed("<arg_value>nul") == [ToolCallDelta(0, '"maybe": ')]
    assert parser.feed("lify") == [ToolCallDelta(0, '"nullify')]


def test_arguments_before_the_name_wait_for_it():
    parser = OutputParser(tool_parser="hermes", reasoning_parser=None, tools=TOOLS)
    assert parser.feed('<tool_call>{"arguments": {"a": [1, {}]}, ') == []
    assert parser.feed('"name": "ls"') == [ToolCallStart(0, "ls"), ToolCallDelta(0, '{"a": [1, {}]}')]
    assert parser.feed("}") == [ToolCallEnd(0, '{"a": [1, {}]}')]


def test_text_leaves_at_once_but_for_what_may_become_a_marker_and_trailing_space():
    parser = OutputParser(tool_parser="qwen", reasoning_parser="qwen3", tools=())
    assert parser.feed("\n Hel") == [TextDelta("Hel")]
    assert parser.feed("lo <") == [TextDelta("lo")]
    assert parser.feed("b> <tool") == [TextDelta(" <b>")]
    assert parser.feed("s") == [TextDelta(" <tools")]
    assert parser.feed(" \n") == parser.finish() == []


MALFORMED = {
    "single quotes": ('<tool_call>{"name": "ls", "arguments": {\'a\': 1}}</tool_call>', "{'a': 1}}"),
    "a raw line break in a string": (
        '<tool_call>{"name": "ls", "arguments": {"a": "\n"}}</tool_call>',
        '{"a": "\n"}',
    ),
    "arguments as a string": ('<tool_call>{"name": "ls", "arguments": "{}"}</tool_call>', '"{}"'),
    "no JSON": ('<tool_call>{"name": "ls", "arguments": none!}</tool_call>', "none!}"),
    "cut off": ('<tool_call>{"name": "ls", "arguments": {"a": "b</tool_call>', '{"a": "b</tool_call>'),
    "cut off before the last brace": ('<tool_call>{"name": "ls", "arguments": {"a": 1}', '{"a": 1}'),
}


@pytest.mark.parametrize(("raw", "sampled"), MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_call_keeps_what_was_sampled(raw, sampled):
    events, result = parse(raw)
    assert events[-1] == ToolCallEnd(0, sampled, ill_formed=True)
    assert result.tool_uses == [{"name": "ls", "input": sampled}]
    assert result.ill_formed
    assert result.text == ""


def test_a_malformed_call_does_not_hide_the_next():
    raw = (
        '<tool_call>{"name": "ls", "arguments": {a}}\n<tool_call>{"name": "ls", "arguments": {}}</tool_call>'
    )
    _, result = parse(raw)
    assert [use["input"] for use in result.tool_uses] == ["{a}", {}]


@pytest.mark.parametrize(
    "raw",
    [
        "<tool_call>none</tool_call>",
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"na',
        "<tool_call>",
    ],
)
def test_what_names_no_tool_is_text(raw):
    _, result = parse(raw)
    assert (result.text, result.tool_uses, result.ill_formed) == (raw, [], True)


def test_a_missing_closing_brace_is_forgiven():
    _, result = parse('<tool_call>\n{"name": "ls", "arguments": {"a": 1}\n</tool_call>')
    assert result.tool_uses == [{"name": "ls", "input": {"a": 1}}]
    assert not result.ill_formed


def test_a_brace_too_many_is_text():
    _, result = parse('<tool_call>{"name": "ls", "arguments": {}}}</tool_call>ok')
    assert (result.tool_uses, result.text) == ([{"name": "ls", "input": {}}], "}ok")


def test_a_call_without_arguments_has_empty_ones():
    events, _ = parse('<tool_call>{"name": "ls"}</tool_call>')
    assert events == [ToolCallStart(0, "ls"), ToolCallDelta(0, "{}"), ToolCallEnd(0, "{}")]


def test_several_calls_in_one_pair_of_markers():
    raw = '<tool_call>[{"name": "ls", "arguments": {}}, {"name": "edit", "arguments": {}}]</tool_call>'
    assert [use["name"] for use in parse(raw)[1].tool_uses] == ["ls", "edit"]
    raw = "<tool_call><function=ls></function>\n<function=ls></function></tool_call>"
    assert len(parse(raw, "qwen3_coder")[1].tool_uses) == 2


def test_values_between_tags_are_typed_by_the_schema():
    def value(parameter, text):
        raw = f"<function=edit><parameter={parameter}>{text}</parameter></function>"
        return parse(raw, "qwen3_coder")[1].tool_uses[0]["input"][parameter]

    assert value("text", "12") == "12"
    assert value("text", "null") == "null"
    assert value("count", "12") == 12
    assert value("count", "twelve") == "twelve"
    assert value("ratio", " 1.5\n") == 1.5
    assert value("flag", "True") is True
    assert value("items", '[1, "</parameter>"]') == [1, "</parameter>"]
    assert value("options", '{"a": null}') == {"a": None}
    assert value("maybe", "null") is None
    assert value("maybe", "nul") == "nul"
    assert value("other", "12") == "12"


def test_tags_of_the_format_within_a_value_are_text():
    text = "<tool_call>\n<function=ls>\n</function>\n</tool_call></parameter>."
    raw = f"<tool_call>\n<function=edit>\n<parameter=text>\n{text}\n</parameter>\n</function>\n</tool_call>"
    assert parse(raw, "qwen3_coder")[1].tool_uses == [{"name": "edit", "input": {"text": text}}]


@pytest.mark.parametrize(
    "body",
    ["<parameter=text>a", "<parameter=text>\na\n</parameter>\n", "{}", "<parameter=text", "a</function>"],
)
def test_a_call_between_tags_that_does_not_fit_keeps_what_was_sampled(body):
    _, result = parse(f"<tool_call><function=edit>{body}", "qwen3_coder")
    assert result.tool_uses == [{"name": "edit", "input": body}]
    assert result.ill_formed


def test_a_bare_call_needs_a_known_tool():
    assert parse('{"name": "ls", "parameters": {}}', "llama3")[1].tool_uses
    answer = parse('{"name": "Bob", "age": 3}', "llama3")[1]
    assert (answer.text, answer.ill_formed) == ('{"name": "Bob", "age": 3}', False)
    assert parse("<function=ls></function>", "qwen3_coder")[1].tool_uses
    assert parse("<function=Bob></function>", "qwen3_coder")[1].text == "<function=Bob></function>"


def test_mistral_call_ids_are_passed_over():
    assert parse("[TOOL_CALLS]ls[CALL_ID]abc123def[ARGS]{}", "mistral")[1].tool_uses == [
        {"name": "ls", "input": {}}
    ]


def test_reasoning_that_the_prompt_opened():
    events, result = parse("\nhm \n</think>\n\nYes", opens_reasoning=True)
    assert events == [ReasoningDelta("hm"), TextDelta("Yes")]
    assert not result.ill_formed
    assert parse("<think>hm</think>Yes", opens_reasoning=True)[0] == events
    assert parse("hm</think>Yes", reasoning_parser="deepseek-r1")[0] == events


def test_reasoning_that_is_never_closed_stays_reasoning():
    _, result = parse('<think>hm <tool_call>{"name": "ls", "arguments": {}}</tool_call>')
    assert (result.text, result.tool_uses, result.ill_formed) == ("", [], True)
    assert result.reasoning.startswith("hm <tool_call>")


@pytest.mark.parametrize(
    ("tool", "think", "call"),
    [
        ("glm45", "glm45", "<tool_call>ls</tool_call>"),
        (
            "kimi_k2",
            "kimi_k2",
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.ls:0<|tool_call_argument_begin|>{}<|tool_call_end|>",
        ),
    ],
)
def test_a_call_ends_reasoning_in_families_that_do_so(tool, think, call):
    _, result = parse("<think>hm" + call, tool, think)
    assert (result.reasoning, result.tool_uses) == ("hm", [{"name": "ls", "input": {}}])
    assert parse("<think>hm" + call, None, think)[1].reasoning == "hm" + call


def test_reasoning_markers_elsewhere_are_text():
    _, result = parse("Say <think> and </think>.")
    assert (result.reasoning, result.text, result.ill_formed) == ("", "Say <think> and </think>.", True)
    _, result = parse("</think>\n\nYes")
    assert (result.text, result.ill_formed) == ("Yes", False)
    _, result = parse('<tool_call>{"name": "ls", "arguments": {"a": "<think>"}}</tool_call><think>b</think>c')
    assert (result.reasoning, result.text) == ("b", "c")


def test_reasoning_may_come_again_after_a_call():
    call = '<tool_call>{"name": "ls", "arguments": {}}</tool_call>'
    events, result = parse(f"<think>a</think>{call}\n<think>b</think>{call}")
    assert [
        type(event).__name__ for event in events if not isinstance(event, ToolCallDelta | ToolCallEnd)
    ] == [
        "ReasoningDelta",
        "ToolCallStart",
        "ReasoningDelta",
        "ToolCallStart",
    ]
    assert len(result.tool_uses) == 2


def test_unknown_parsers_are_refused_with_the_nearest_name():
    with pytest.raises(ConfigError, match="did you mean 'qwen3_coder'"):
        OutputParser(tool_parser="qwen3-coder", reasoning_parser=None)
    with pytest.raises(ConfigError, match="did you mean 'deepseek-r1'"):
        OutputParser(tool_parser=None, reasoning_parser="deepseek_r1")


def test_nothing_is_fed_after_the_end():
    parser = OutputParser(tool_parser=None, reasoning_parser=None)
    parser.finish()
    with pytest.raises(ValueError, match="finish"):
        parser.feed("a")


@pytest.mark.parametrize(
    ("template", "names"),
    [
        ("{{ '<|im_start|>' + content }}", (None, None)),
        ("<tool_call>\\n{{ tool_call.name }}</tool_call> </think>", ("qwen", "qwen3")),
        ("<tool_call>\\n<function=example_function_name>", ("qwen3_coder", None)),
        ("<tool_call>{{ name }}<arg_key> <think></think>", ("glm45", "glm45")),
        ("<|tool_calls_section_begin|> <think></think>", ("kimi_k2", "kimi_k2")),
        ("<｜Assistant｜><｜tool▁call▁begin｜> ```json </think>", ("deepseekv3", "deepseek-v3")),
        ("{% if thinking %}<｜Assistant｜></think> <｜tool▁call▁begin｜>", ("deepseekv31", "deepseek-v3")),
        ("[TOOL_CALLS] [THINK][/THINK]", ("mistral", "mistral")),
        ("<|python_tag|>", ("llama3", None)),
        ("<|python_tag|> <function={{ name }}>", (None, None)),
        ("<tool_call></tool_call> <invoke name=", (None, None)),
    ],
)
def test_the_template_tells_the_parsers(template, names):
    assert detect_parsers(template) == names

import copy

import pytest

from slime.agent.encoding import TextEncoder
from slime.agent.template import ChatTemplate
from slime.agent.template_probe import Renderer
from slime.agent.template_turns import Turn, TurnFinder, pieces
from slime.errors import DataError, ModelError
from tests.agent.templates import FAMILIES, family_tokenizer


def finder(name, template=None):
    tokenizer = family_tokenizer(name)
    if template is not None:
        tokenizer = copy.deepcopy(tokenizer)
        tokenizer.chat_template = template
    report = ChatTemplate(tokenizer).report
    return TurnFinder(Renderer(tokenizer, {}), report, TextEncoder(tokenizer, lambda text: False).special)


CHANNELS = r"""
{{- '<|start|>system<|message|>You are a model.<|end|>' }}
{%- set ns = namespace(called='', user=-1) %}
{%- for message in messages %}
{%- if message.role == 'user' %}{%- set ns.user = loop.index0 %}{%- endif %}{%- endfor %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}
{%- if message.reasoning_content and loop.index0 > ns.user %}
{{- '<|start|>assistant<|channel|>analysis<|message|>' + message.reasoning_content + '<|end|>' }}{%- endif %}
{%- if message.tool_calls %}
{%- set call = message.tool_calls[0].function %}{%- set ns.called = call.name %}
{{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}
{{- (call.arguments | tojson) + '<|call|>' }}
{%- elif loop.last and not add_generation_prompt %}
{{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|return|>' }}
{%- else %}
{{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}{%- endif %}
{%- elif message.role == 'tool' %}
{{- '<|start|>functions.' + ns.called + ' to=assistant<|channel|>commentary<|message|>' }}
{{- (message.content | tojson) + '<|end|>' }}
{%- else %}{{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"""


def talk(*texts):
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]


def found(turns, messages):
    text, spans = turns.find(messages, (), [f"message {i}" for i in range(len(messages))])
    return [text[turn.start : turn.end] for turn in spans]


@pytest.mark.parametrize("name", FAMILIES)
def test_everything_between_generation_prompt_and_end_is_the_turn(name):
    (first, second) = found(finder(name), talk("a", "same", "same", "same"))
    report = ChatTemplate(family_tokenizer(name)).report
    assert "same" in first and "same" in second
    assert first.endswith(report.ends) and (second.endswith(report.ends) or report.ends_with_next_role)


def test_a_conversation_without_assistant_has_no_turns():
    assert finder("chatml").find(talk("a"), (), ["message 0"])[1] == []


def test_a_turn_that_talks_like_what_stands_between_turns_is_found_by_real_tokens():
    said = "b\n\nuser\nc\nassistant\n"
    assert found(finder("chatml"), talk("a", said, "c", "d")) == [f"{said}<|im_end|>", "d<|im_end|>"]


def test_a_turn_that_holds_the_very_text_between_turns_is_refused():
    said = "b<|im_end|>\n<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n"
    with pytest.raises(DataError, match=r"message 1.*several places"):
        found(finder("chatml"), talk("a", said, "c", "d"))


def test_a_message_that_the_template_does_not_show_is_named():
    said = "message.role == 'assistant'"
    turns = finder("chatml", FAMILIES["chatml"].template.replace(said, f"{said} and message.content != 'no'"))
    with pytest.raises(DataError, match=r"message 3.*behind it differently"):
        found(turns, talk("a", "b", "c", "no", "e", "f"))


def test_turns_that_do_not_begin_as_generations_do_are_refused_at_start():
    template = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' }}"
    template += "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>robot\n' }}{% endif %}"
    with pytest.raises(ModelError, match="generation prompt ends with 'robot"):
        finder("chatml", template)


def test_a_turn_of_several_parts_is_one_turn_with_the_end_that_it_has():
    function = {"name": "ls", "arguments": {"path": "x"}}
    call = {"id": "call_a", "type": "function", "function": function}
    messages = [
        *talk("a", "b", "c"),
        {"role": "assistant", "content": "", "reasoning_content": "why", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_a", "content": "<|end|>"},
        {"role": "assistant", "content": "d", "reasoning_content": "so"},
    ]
    assert found(finder("harmony", CHANNELS), messages) == [
        "<|channel|>final<|message|>b<|end|>",
        "<|channel|>analysis<|message|>why<|end|><|start|>assistant to=functions.ls"
        '<|channel|>commentary json<|message|>{"path": "x"}<|call|>',
        "<|channel|>analysis<|message|>so<|end|><|start|>assistant<|channel|>final<|message|>d<|return|>",
    ]


def test_pieces_are_the_whole_text():
    text, spans = "0123456789", [Turn(1, 2, 4), Turn(3, 4, 9)]
    assert [piece for piece, _ in pieces(text, spans)] == ["01", "23", "", "45678", "9"]
    assert [turn for _, turn in pieces(text, spans) if turn] == spans

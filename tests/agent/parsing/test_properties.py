"""For every family: what was written is read back, however it is cut, and nothing is lost."""

import json
import re

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from slime.agent.parsing import (
    OutputParser,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
)
from slime.agent.parsing.reasoning import REASONING_FORMATS
from tests.agent.parsing.families import FAMILIES, TOOLS, parser_name

QUICK = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much]
)
ALL_MARKERS = sorted({marker for family in FAMILIES.values() for marker in family.markers})
NASTY = [
    *ALL_MARKERS,
    "</parameter>",
    "</function>",
    "</arg_value>",
    "<parameter=x>",
    "<think>",
    "</think>",
    '"',
    "\\",
    "\\u00e9",
    "{",
    "}",
    "[",
    "]",
    "```",
    "\n",
    "\r\n",
    "\t",
    " ",
    "\u2028",
    "é",
    "🙂",
    "a",
    "'",
    "null",
    "<",
    "</",
]
TEXT_PARTS = [
    "a",
    "é",
    "🙂",
    " ",
    "\n",
    "<",
    "</",
    "<｜",
    "<|",
    "[",
    "{",
    "}",
    '"',
    "\\",
    "```",
    "tool",
    "◁",
    ":",
]

texts = st.lists(st.sampled_from(TEXT_PARTS), max_size=8).map("".join)
nasty = st.lists(st.sampled_from(NASTY), max_size=8).map("".join) | st.text(max_size=12)
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**60), 2**60)
    | st.floats(allow_nan=False, allow_infinity=False)
    | nasty,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(nasty, inner, max_size=3),
    max_leaves=6,
)
typed_arguments = st.fixed_dictionaries(
    {},
    optional={
        "text": nasty,
        "count": st.integers(-(2**60), 2**60),
        "ratio": st.floats(allow_nan=False, allow_infinity=False),
        "flag": st.booleans(),
        "items": st.lists(json_values, max_size=3),
        "options": st.dictionaries(nasty, json_values, max_size=3),
        "maybe": st.none() | nasty.filter(lambda text: text not in ("null", "None")),
        "unheard of": nasty,
    },
)


def calls_of(family):
    arguments = typed_arguments if family.typed else st.dictionaries(nasty, json_values, max_size=3)
    named = st.tuples(st.just("edit"), arguments)
    if family.typed:
        return st.lists(
            named | st.tuples(st.just("unknown_tool"), st.fixed_dictionaries({"x": nasty})), max_size=3
        )
    return st.lists(named | st.tuples(st.sampled_from(["mcp__x-y", "é"]), arguments), max_size=3)


def cut(draw, raw):
    if draw(st.booleans()):
        return list(raw)
    ends = sorted(draw(st.lists(st.integers(0, len(raw)), max_size=6)))
    return [raw[a:b] for a, b in zip([0, *ends], [*ends, len(raw)], strict=True)]


def parse(pieces, **settings):
    parser = OutputParser(**settings)
    events = [event for piece in pieces for event in parser.feed(piece)]
    events += parser.finish()
    return events, parser.result


def joined(events):
    """The events with neighbouring deltas of a kind joined."""
    out = []
    for event in events:
        last = out[-1] if out else None
        if isinstance(event, ToolCallDelta) and isinstance(last, ToolCallDelta):
            out[-1] = ToolCallDelta(event.index, last.json + event.json)
        elif isinstance(event, TextDelta | ReasoningDelta) and type(last) is type(event):
            out[-1] = type(event)(last.text + event.text)
        else:
            out.append(event)
    return out


def check_events(events, result):
    """The stream says what the result says."""
    assert "".join(e.text for e in events if isinstance(e, TextDelta)) == result.text
    assert "".join(e.text for e in events if isinstance(e, ReasoningDelta)) == result.reasoning
    calls = [e for e in events if isinstance(e, ToolCallStart)]
    ends = [e for e in events if isinstance(e, ToolCallEnd)]
    assert [e.index for e in calls] == [e.index for e in ends] == list(range(len(result.tool_uses)))
    for start, end, use in zip(calls, ends, result.tool_uses, strict=True):
        deltas = "".join(e.json for e in events if isinstance(e, ToolCallDelta) and e.index == end.index)
        assert start.name == use["name"]
        assert end.ill_formed or (deltas == end.arguments and json.loads(end.arguments) == use["input"])
        assert not end.ill_formed or (result.ill_formed and end.arguments == use["input"])
    for event in events:
        if isinstance(event, TextDelta | ReasoningDelta | ToolCallDelta):
            assert event.json if isinstance(event, ToolCallDelta) else event.text


@st.composite
def documents(draw, family, think):
    """(raw, pieces, reasoning, text, calls)"""
    spelled = (
        json.dumps if draw(st.booleans()) else lambda value: json.dumps(value, ensure_ascii=False, indent=1)
    )
    reasoning = draw(st.none() | texts)
    blocks = draw(st.lists(st.tuples(calls_of(family), texts), max_size=2))
    first = draw(texts)
    raw, text, calls, last = first, first, [], "."
    for some, after in blocks:
        last = after if some else last + after
        assume(not last.lstrip().startswith(family.after))
        for _, arguments in some:
            for value in arguments.values():
                breakers = family.rule_breakers
                assume(not isinstance(value, str) or not any(re.search(b, value) for b in breakers))
        raw += (family.render(some, spelled) if some else "") + after
        text += after
        calls += some
    for marker in (*family.markers, think.opening, think.closing):
        assume(marker not in text and marker not in (reasoning or ""))
    assume(not first.lstrip().startswith("{"))
    if reasoning is not None:
        raw = think.opening + reasoning + think.closing + raw
    return raw, cut(draw, raw), (reasoning or "").strip(), text.strip(), calls


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("think", ["qwen3", "kimi", "mistral"])
def test_what_is_rendered_is_read_back_however_it_is_cut(name, think):
    family = FAMILIES[name]
    formats = {"tool_parser": parser_name(name), "reasoning_parser": think, "tools": TOOLS}

    @QUICK
    @given(documents(family, REASONING_FORMATS[think]))
    def check(document):
        raw, pieces, reasoning, text, calls = document
        whole_events, whole = parse([raw], **formats)
        events, result = parse(pieces, **formats)
        assert joined(events) == joined(whole_events)
        assert result == whole
        check_events(events, result)
        assert result.reasoning == reasoning
        assert result.text == text
        assert result.tool_uses == [{"name": n, "input": a} for n, a in calls]
        assert not result.ill_formed

    check()


WORD = re.compile("§[0-9]+#")
ENVELOPE = [
    '{"name": "edit", "arguments": {"text": "',
    '"}}',
    '{"name": "nobody", "arguments": {}}',
    '{"arguments": {"n": 1}, "name": "edit"}',
    "<function=edit>",
    "<parameter=text>",
    "edit",
    "<arg_key>text</arg_key>",
    "<arg_value>",
    '<｜DSML｜invoke name="edit">',
    '<｜DSML｜parameter name="text" string="true">',
    "</｜DSML｜invoke>",
    "function<｜tool▁sep｜>edit",
    "<｜tool▁sep｜>",
    "functions.edit:0",
    "<|tool_call_argument_begin|>",
    "[ARGS]",
    "◁think▷",
    "[/THINK]",
]
pieces_of_garbage = st.sampled_from([*NASTY, *ENVELOPE, "§", "§"]) | st.text(max_size=4)


@pytest.mark.parametrize("name", [*FAMILIES, None])
@pytest.mark.parametrize("think", ["qwen3", "deepseek-r1", "kimi_k2", None])
def test_garbage_raises_nothing_loses_nothing_and_is_the_same_however_it_is_cut(name, think):
    formats = {"tool_parser": name and parser_name(name), "reasoning_parser": think, "tools": TOOLS}

    @QUICK
    @given(st.lists(pieces_of_garbage, max_size=25), st.booleans(), st.data())
    def check(parts, opens, data):
        words = iter(range(100))
        raw = "".join(f"§{next(words)}#" if part == "§" else part for part in parts)
        whole_events, whole = parse([raw], opens_reasoning=opens, **formats)
        events, result = parse(cut(data.draw, raw), opens_reasoning=opens, **formats)
        assert joined(events) == joined(whole_events)
        assert result == whole
        check_events(events, result)
        inputs = [
            use["input"] if isinstance(use["input"], str) else json.dumps(use["input"], ensure_ascii=False)
            for use in result.tool_uses
        ]
        names = [use["name"] for use in result.tool_uses]
        given_words = WORD.findall("\n".join([result.reasoning, result.text, *names, *inputs]))
        assert sorted(given_words) == sorted(WORD.findall(raw))

    check()


@QUICK
@given(st.text())
def test_without_parsers_everything_is_text(raw):
    events, result = parse(list(raw), tool_parser=None, reasoning_parser=None)
    check_events(events, result)
    assert result.text == raw.strip()
    assert not (result.reasoning or result.tool_uses or result.ill_formed)

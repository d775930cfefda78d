"""`parse_model_output`: our parsers, SGLang's where it is importable, and the fallback to tagged calls."""

import logging
import sys

import pytest

from slime.agent.parsing import parse_model_output, sglang_parsers
from slime.errors import ConfigError
from tests.agent.parsing.families import TOOLS

CALL = '<tool_call>{"name": "ls", "arguments": {"a": 1}}</tool_call>'


def parse(raw, tool="qwen", think="qwen3", tools=TOOLS):
    return parse_model_output(raw, tools_schema=tools, tool_parser_name=tool, reasoning_parser_name=think)


def test_the_whole_output():
    parsed = parse(f"<think>\nhm\n</think>\n\nYes\n{CALL}")
    assert (parsed.reasoning, parsed.text, parsed.ill_formed) == ("hm", "Yes", False)
    assert parsed.tool_uses == [{"name": "ls", "input": {"a": 1}}]


def test_reasoning_without_an_opening_was_opened_by_the_prompt():
    parsed = parse(f"hm</think>Yes {CALL}")
    assert (parsed.reasoning, parsed.text, len(parsed.tool_uses)) == ("hm", "Yes", 1)
    assert not parsed.ill_formed
    parsed = parse(f"{CALL}No </think>")
    assert (parsed.reasoning, len(parsed.tool_uses)) == ("", 1)


def test_without_tools_or_parser_calls_stay_text():
    assert parse(CALL, tools=None).text == CALL
    assert parse(CALL, tool=None).text == CALL


def test_tagged_calls_of_known_tools_are_taken_where_the_named_parser_finds_none():
    parsed = parse("Well <tool_call><function=ls></function></tool_call>")
    assert (parsed.text, parsed.tool_uses, parsed.ill_formed) == (
        "Well",
        [{"name": "ls", "input": {}}],
        False,
    )
    raw = "<tool_call><function=rm></function></tool_call>"
    assert parse(raw).text == raw


def test_unknown_names_are_refused():
    with pytest.raises(ConfigError, match="hermse"):
        parse("a", tool="hermse")


FAKE = {
    "entrypoints.openai.protocol": """
class Tool:
    @classmethod
    def model_validate(cls, tool):
        return tool
""",
    "function_call.function_call_parser": """
import collections
Item = collections.namedtuple("Item", "tool_index name parameters")
class FunctionCallParser:
    ToolCallParserEnum = {"odd": object, "qwen": object, "hermes": object}
    def __init__(self, tools, name):
        self.tools, self.name = tools, name
    def has_tool_call(self, text):
        return "!" in text
    def parse_non_stream(self, text):
        if self.name == "qwen":
            raise KeyError(text)
        if self.name == "hermes":
            return text.split("<")[0], [Item(0, "ls", '{"a": 2}')] if "ls" in text else []
        text, _, name = text.partition("!")
        return text, [Item(0, name, '{"a": 1}')] if name else []
""",
    "parser.reasoning_parser": """
class ReasoningParser:
    DetectorMap = {"odd": object, "qwen3": object}
    def __init__(self, model_type, stream_reasoning):
        pass
    def parse_non_stream(self, text):
        return "", text
""",
}


@pytest.fixture
def sglang(tmp_path, monkeypatch):
    """A package that has SGLang's parser modules, one of its parsers failing."""
    for name, source in FAKE.items():
        path = tmp_path.joinpath("sglang", "srt", *name.split(".")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    sglang_parsers._modules.cache_clear()
    yield
    sglang_parsers._modules.cache_clear()
    for name in [name for name in sys.modules if name.partition(".")[0] == "sglang"]:
        del sys.modules[name]


@pytest.mark.usefixtures("sglang")
def test_sglangs_parsers_are_used_where_they_know_the_names():
    parsed = parse("hm</think>Yes!ls", tool="odd", think="odd")
    assert (parsed.reasoning, parsed.text) == ("hm", "Yes")
    assert parsed.tool_uses == [{"name": "ls", "input": {"a": 1}}]


@pytest.mark.usefixtures("sglang")
def test_a_failure_of_sglangs_parsers_is_logged_and_ours_are_used(caplog):
    with caplog.at_level(logging.WARNING):
        assert len(parse(CALL).tool_uses) == 1
    assert "SGLang's parsers qwen and qwen3 failed" in caplog.text


@pytest.mark.usefixtures("sglang")
def test_ours_are_used_where_sglangs_lose_text_or_calls():
    assert parse(f"Well {CALL}", tool="hermes").tool_uses == [{"name": "ls", "input": {"a": 2}}]
    assert parse(f"Well {CALL} then", tool="hermes").text == "Well  then"
    assert len(parse(CALL * 2, tool="hermes").tool_uses) == 2
    assert parse("a <b> c", tool="hermes").text == "a <b> c"


@pytest.mark.usefixtures("sglang")
def test_names_that_sglang_does_not_know_are_ours():
    assert len(parse(CALL, tool="qwen25").tool_uses) == 1

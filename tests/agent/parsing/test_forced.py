"""A call that was begun for the model reads as one that it began itself."""

import pytest

from slime.agent.parsing import TOOL_FORMATS, OutputParser
from slime.agent.parsing.forced import call_opening

TOOLS = [{"type": "function", "function": {"name": "read", "parameters": {"type": "object"}}}]
RESTS = {
    "qwen": ' {"path": "a"}}\n</tool_call>',
    "hermes": ' {"path": "a"}}\n</tool_call>',
    "qwen25": ' {"path": "a"}}\n</tool_call>',
    "qwen3_coder": "<parameter=path>\na\n</parameter>\n</function>\n</tool_call>",
    "deepseekv3": '{"path": "a"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "deepseekv31": '{"path": "a"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "glm": "<arg_key>path</arg_key>\n<arg_value>a</arg_value>\n</tool_call>",
    "glm45": "<arg_key>path</arg_key>\n<arg_value>a</arg_value>\n</tool_call>",
    "glm47": "<arg_key>path</arg_key>\n<arg_value>a</arg_value>\n</tool_call>",
    "llama3": ' {"path": "a"}}',
    "kimi_k2": '{"path": "a"}<|tool_call_end|><|tool_calls_section_end|>',
}


@pytest.mark.parametrize("name", RESTS)
def test_a_call_of_a_named_tool_is_begun(name):
    parser = OutputParser(tool_parser=name, reasoning_parser=None, tools=TOOLS)
    parser.feed(call_opening(name, "read"))
    parser.feed(RESTS[name])
    parser.finish()
    assert parser.result.tool_uses == [{"name": "read", "input": {"path": "a"}}]
    assert not parser.result.ill_formed
    assert call_opening(name, "read").startswith(call_opening(name, None))


def test_some_formats_have_no_beginning_of_their_own():
    assert {name for name in TOOL_FORMATS if call_opening(name, None) is None} == TOOL_FORMATS.keys() - RESTS
    assert call_opening(None, "read") is None

"""Fields and tools of a body; whatever JSON comes in gives a request or a refusal that names the field."""

import copy
import json

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.agent.adapters.wire import AdapterError, ModelRequest
from slime.agent.messages import match_key
from tests.agent.adapters.anthropic_kit import PNG, TOOL, WIRE, one, real, translate


def refused(messages, **fields):
    with pytest.raises(AdapterError) as caught:
        translate(messages, **fields)
    assert caught.value.kind == "invalid_request"
    return caught.value.message


def test_custom_tools_are_functions_and_server_tools_are_left_out():
    tools = [
        TOOL,
        {"type": "custom", "name": "Read", "input_schema": {"type": "object"}, "cache_control": {}},
        {"type": "web_search_20250305", "name": "web_search"},
        {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"},
    ]
    told = translate([{"role": "user", "content": "x"}], tools=tools).tools
    assert [tool["function"]["name"] for tool in told] == ["Bash", "Read"]
    assert told[0] == {
        "type": "function",
        "function": {"name": "Bash", "description": "Runs.", "parameters": TOOL["input_schema"]},
    }


def test_tools_that_are_loaded_later_leave_the_list_alone_and_stand_where_they_were_loaded():
    before, after = real("claude_first"), real("claude_after_toolsearch")
    assert before.tools == after.tools
    assert {tool["function"]["name"] for tool in after.extra["deferred_tools"]} >= {
        "WebFetch",
        "NotebookEdit",
    }
    loaded = after.messages[-1]["content"].splitlines()
    assert [line.split(":", 1)[0] for line in loaded] == ["Tool loaded", "Tool loaded"]
    schema = json.loads(loaded[0].split(": ", 1)[1])
    assert (
        schema["function"]["name"] == "WebFetch" and "url" in schema["function"]["parameters"]["properties"]
    )


def test_tools_that_a_system_message_adds_and_removes_are_told():
    content = [
        {"type": "tool_addition", "tool": {"type": "tool_reference", "name": "Late"}},
        {"type": "tool_addition", "tool": {"type": "tool_definition", "definition": TOOL}},
        {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "Bash"}},
    ]
    lines = one(content, role="system")[0]["content"].splitlines()
    assert lines[0] == "Tool loaded: Late" and '"Runs."' in lines[1] and lines[2] == "Tool removed: Bash"


@pytest.mark.parametrize(
    "choice, told, parallel",
    [
        (None, "auto", True),
        ({"type": "auto", "disable_parallel_tool_use": True}, "auto", False),
        ({"type": "any"}, "required", True),
        ({"type": "none"}, "none", True),
        ({"type": "tool", "name": "Bash"}, "Bash", True),
    ],
)
def test_tool_choices(choice, told, parallel):
    request = translate([{"role": "user", "content": "x"}], tools=[TOOL], tool_choice=choice)
    assert (request.tool_choice, request.parallel_tool_calls) == (told, parallel)


def test_limits_are_read_and_sampling_parameters_are_not():
    fields = {"stop_sequences": ["a", "b"], "stream": True, "max_tokens": 7}
    plain = translate([{"role": "user", "content": "x"}], **fields)
    assert (plain.max_tokens, plain.stop, plain.stream, plain.model) == (7, ["a", "b"], True, "m")
    pinned = {"temperature": 0, "top_p": 0.1, "top_k": 1, "thinking": {"type": "disabled"}, "metadata": {}}
    assert translate([{"role": "user", "content": "x"}], **fields, **pinned) == plain


def test_a_body_of_count_tokens_is_translated_as_that_of_the_message():
    request = real("claude_count_tokens")
    assert request.max_tokens is None
    body = {"messages": [{"role": "user", "content": "x"}], "system": "s", "tools": [TOOL]}
    counted, sent = WIRE.translate(body, {}), WIRE.translate({**body, "max_tokens": 5}, {})
    assert (counted.messages, counted.tools) == (sent.messages, sent.tools)


@pytest.mark.parametrize(
    "messages, fields, path",
    [
        ("x", {}, "messages"),
        ([], {}, "messages"),
        ([1], {}, "messages[0]"),
        ([{"role": "robot", "content": "x"}], {}, "messages[0].role"),
        ([{"content": "x"}], {}, "messages[0].role"),
        ([{"role": "user", "content": 1}], {}, "messages[0].content"),
        ([{"role": "user", "content": [{"type": "audio"}]}], {}, "messages[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "text"}]}], {}, "messages[0].content[0].text"),
        ([{"role": "user", "content": [{"type": "tool_use"}]}], {}, "messages[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "tool_result"}]}], {}, "messages[0].content[0].tool_use_id"),
        ([{"role": "user", "content": [{"type": "image"}]}], {}, "messages[0].content[0].source"),
        (
            [{"role": "user", "content": [{"type": "document", "source": {"type": "base64", "data": "A"}}]}],
            {},
            "messages[0].content[0].source.type",
        ),
        ([{"role": "user", "content": "x"}], {"max_tokens": 0}, "max_tokens"),
        ([{"role": "user", "content": "x"}], {"stream": "yes"}, "stream"),
        ([{"role": "user", "content": "x"}], {"system": {}}, "system"),
        ([{"role": "user", "content": "x"}], {"stop_sequences": ["a", ""]}, "stop_sequences[1]"),
        ([{"role": "user", "content": "x"}], {"tools": [{"input_schema": {}}]}, "tools[0].name"),
        ([{"role": "user", "content": "x"}], {"tools": [{"type": "bash_20250124"}]}, "tools[0].type"),
        (
            [{"role": "user", "content": "x"}],
            {"tool_choice": {"type": "tool", "name": "No"}},
            "tool_choice.name",
        ),
        ([{"role": "user", "content": "x"}], {"tool_choice": {"type": "any"}}, "tool_choice"),
        ([{"role": "user", "content": "x"}], {"tool_choice": {"type": "maybe"}}, "tool_choice.type"),
    ],
)
def test_what_is_malformed_is_refused_by_the_name_of_its_field(messages, fields, path):
    assert refused(messages, **fields).startswith(f"{path}: ")


def test_nesting_that_cannot_be_written_again_is_refused():
    deep = orjson.loads('{"a":' * 300 + "1" + "}" * 300)
    call = {"type": "tool_use", "id": "t", "name": "n", "input": deep}
    assert "nested" in refused([{"role": "assistant", "content": [call]}])
    assert "nested" in refused(
        [{"role": "assistant", "content": [{"type": "server_tool_use", "input": deep}]}]
    )


WORD = st.text(max_size=4)
NAME = st.sampled_from(["Bash", "Read", "web_search"])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | WORD,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORD, inner, max_size=3),
)


def object_of(needed, **optional):
    return st.fixed_dictionaries(
        {name: st.just(kind) if isinstance(kind, str) else kind for name, kind in needed.items()},
        optional=optional,
    )


def several(*blocks):
    return WORD | st.lists(st.one_of(*blocks), max_size=3)


MARK = {"cache_control": JSON}
TEXT = object_of({"type": "text", "text": WORD}, **MARK)
IMAGE = object_of({"type": "image", "source": st.just(PNG)}, **MARK)
SOURCES = object_of({"type": "text", "data": WORD}) | object_of(
    {"type": "content", "content": several(TEXT, IMAGE)}
)
DOCUMENT = object_of({"type": "document", "source": SOURCES}, title=WORD, context=WORD)
FOUND = object_of({"type": "search_result", "title": WORD, "source": WORD, "content": several(TEXT)})
LOADED = object_of({"type": "tool_reference", "tool_name": NAME})
RESULT = object_of(
    {"type": "tool_result", "tool_use_id": NAME},
    content=several(TEXT, IMAGE, DOCUMENT, FOUND, LOADED),
    is_error=st.booleans(),
)
INPUT = st.dictionaries(st.sampled_from(["x", "_raw_arguments", "__unparsedToolInput"]), JSON, max_size=2)
CALL = object_of({"type": "tool_use", "id": NAME, "name": NAME, "input": INPUT})
THOUGHT = object_of({"type": "thinking", "thinking": WORD}, signature=WORD)
HIDDEN = object_of({"type": "redacted_thinking", "data": NAME})
SERVER = object_of(
    {"type": st.sampled_from(["server_tool_use", "mcp_tool_result"])}, input=JSON, content=JSON
)
CHANGED = object_of(
    {"type": st.sampled_from(["tool_addition", "tool_removal"]), "tool": object_of({"name": NAME})}
)
MESSAGE = st.one_of(
    object_of({"role": "user", "content": several(TEXT, IMAGE, DOCUMENT, FOUND, RESULT)}),
    object_of({"role": "assistant", "content": several(TEXT, CALL, THOUGHT, HIDDEN, SERVER)}),
    object_of({"role": "system", "content": several(TEXT, CHANGED)}),
)
OFFERED = object_of(
    {"name": NAME, "input_schema": st.dictionaries(WORD, JSON, max_size=2)}, defer_loading=st.booleans()
)
BODY = object_of(
    {"messages": st.lists(MESSAGE, min_size=1, max_size=4)},
    system=several(TEXT),
    tools=st.lists(OFFERED, min_size=1, max_size=3),
    tool_choice=object_of(
        {"type": st.sampled_from(["auto", "none"])}, disable_parallel_tool_use=st.booleans()
    ),
    stop_sequences=st.lists(NAME, max_size=2),
    max_tokens=st.integers(1, 9),
    stream=st.booleans(),
    output_config=object_of({}, format=object_of({"type": "json_schema"})),
)


def with_a_fault(draw, value):
    """The value with something else, or nothing, in one place of it."""
    keys = (
        list(value) if isinstance(value, dict) else list(range(len(value))) if isinstance(value, list) else []
    )
    if not keys or draw(st.integers(0, 4)) == 0:
        return draw(JSON)
    key, changed = draw(st.sampled_from(keys)), copy.copy(value)
    if draw(st.integers(0, 4)) == 0:
        del changed[key]
    else:
        changed[key] = with_a_fault(draw, value[key])
    return changed


@settings(max_examples=150, deadline=None)
@given(body=BODY)
def test_any_well_formed_body_gives_a_request_that_can_be_told_and_matched(body):
    request = WIRE.translate(orjson.loads(orjson.dumps(body)), {"User-Agent": "claude-cli/2.1.332"})
    assert all(isinstance(match_key(message), int) for message in request.messages)
    assert orjson.dumps([*request.messages, *request.tools])


@settings(max_examples=300, deadline=None)
@given(body=BODY, data=st.data())
def test_any_fault_in_a_body_is_understood_or_refused_by_its_place(body, data):
    faulty = with_a_fault(data.draw, body)
    try:
        request = WIRE.translate(orjson.loads(orjson.dumps(faulty)), {"User-Agent": "claude-cli/2.1.332"})
    except AdapterError as error:
        assert error.kind == "invalid_request" and error.place
        return
    assert isinstance(request, ModelRequest)

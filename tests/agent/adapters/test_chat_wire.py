"""Chat Completions: what clients send in the common form, and the answer in theirs."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.agent.adapters.chat_wire import ChatWire
from slime.agent.adapters.wire import AdapterError, ModelRequest, Origin
from slime.agent.messages import handles_of, match_key
from tests.agent.adapters.wires import (
    LENGTH,
    STOP,
    USAGE,
    anything,
    data_of,
    events_of,
    outputs,
    places,
    replaced,
    sample,
    served,
    written,
)

WIRE = ChatWire()
SAMPLES = (
    "opencode_turn4",
    "qwen_code_turn4",
    "mini_swe_agent_turn4",
    "langchain_turn4",
    "openai_agents_turn4",
)
TOOL = {"type": "function", "function": {"name": "run", "parameters": {"type": "object", "properties": {}}}}
OUTPUT = [("reasoning", "Let me see."), ("text", "I look."), ("run", '{"b": 1, "a": "é"}'), ("run", '{"bad')]


def body(*messages, **fields):
    return {"messages": list(messages) or [{"role": "user", "content": "hi"}], **fields}


def translate(*messages, **fields):
    return WIRE.translate(body(*messages, **fields), {})


def refused(*messages, **fields):
    with pytest.raises(AdapterError) as caught:
        translate(*messages, **fields)
    assert caught.value.kind == "invalid_request"
    return caught.value.message


def assistant(**fields):
    return translate({"role": "user", "content": "hi"}, {"role": "assistant", **fields}).messages[-1]


def call(arguments, name="run"):
    return {"id": "call_1", "type": "function", "function": {"name": name, "arguments": arguments}}


@pytest.mark.parametrize("name", SAMPLES)
def test_a_fourth_turn_of_every_client_shows_three_turns_with_their_calls(name):
    headers, raw = sample(f"chat_{name}")
    request = WIRE.translate(raw, headers)
    turns = [message for message in request.messages if message["role"] == "assistant"]
    results = [message["tool_call_id"] for message in request.messages if message["role"] == "tool"]
    assert [handles_of(turn) for turn in turns] == [(result,) for result in results]
    assert all(turn["tool_calls"][0]["function"]["arguments"] == {"path": "a.py"} for turn in turns)
    assert all(isinstance(message["content"], str) for message in request.messages)
    assert [tool["type"] for tool in request.tools] == ["function"] * len(raw["tools"])


def test_clients_without_calls_give_plain_text():
    _, raw = sample("chat_smolagents_turn2")
    request = WIRE.translate(raw, {})
    assert (request.tool_choice, request.stop) == ("required", ["Observation:", "Calling tools:"])
    assert [message["content"] for message in request.messages][-1] == "user says"
    _, raw = sample("chat_aider_first")
    assert {message["role"] for message in WIRE.translate(raw, {}).messages} == {
        "system",
        "user",
        "assistant",
    }


def test_a_turn_is_the_same_however_its_client_writes_it_down():
    sent = assistant(content=None, reasoning_content="Hm.", tool_calls=[call('{"b": 1, "a": "\\u00e9"}')])
    for again in (
        assistant(content="", tool_calls=[call('{"a":"é","b":1}')]),
        assistant(content=[], reasoning="Hm.", tool_calls=[call({"a": "é", "b": 1})]),
        assistant(tool_calls=[call('{"a": "é", "b": 1}')]),
    ):
        assert handles_of(again) == handles_of(sent) == ("call_1",)
        assert match_key(again) == match_key(sent)


def test_text_is_the_same_as_text_and_as_parts():
    whole = translate({"role": "user", "content": "a\nb"}, {"role": "assistant", "content": "c"}).messages
    parts = translate(
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "c"}]},
    ).messages
    assert whole == parts


def test_roles_and_reasoning_take_their_one_form():
    request = translate(
        {"role": "developer", "content": "be brief"},
        {
            "role": "assistant",
            "content": "x",
            "reasoning": "why",
            "function_call": {"name": "f", "arguments": ""},
        },
        {"role": "function", "name": "f", "content": "1"},
        {"role": "assistant", "refusal": "no"},
    )
    assert request.messages == [
        {"role": "system", "content": "be brief"},
        {
            "role": "assistant",
            "content": "x",
            "reasoning_content": "why",
            "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}],
        },
        {"role": "tool", "name": "f", "content": "1"},
        {"role": "assistant", "content": "no"},
    ]


@pytest.mark.parametrize("text", ["{bad", "[1]", '"x"', '{"a":' * 300 + "1" + "}" * 300])
def test_arguments_that_are_no_object_stay_text(text):
    assert assistant(tool_calls=[call(text)])["tool_calls"][0]["function"]["arguments"] == text


def test_images_pass_through_as_parts():
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA", "detail": "low"}}
    request = translate({"role": "user", "content": [{"type": "text", "text": "see"}, image]})
    assert request.messages[0]["content"] == [
        {"type": "text", "text": "see"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}},
    ]


def test_limits_and_choices():
    assert translate(max_tokens=5).max_tokens == 5
    assert translate(max_tokens=5, max_completion_tokens=6).max_tokens == 6
    assert translate(stop="x").stop == ["x"]
    assert translate().stop == []
    assert translate(tools=[TOOL], parallel_tool_calls=False).parallel_tool_calls is False
    assert translate(tools=[TOOL], tool_choice=TOOL).tool_choice == "run"
    assert translate(tools=[TOOL], tool_choice="none").tool_choice == "none"
    other = {"type": "function", "function": {"name": "other"}}
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [other]}}
    request = translate(tools=[TOOL, other], tool_choice=allowed)
    assert request.tool_choice == "required"
    assert [tool["function"]["name"] for tool in request.tools] == ["other"]


def test_the_origin_is_told_from_headers_and_messages():
    title = body({"role": "system", "content": "You are a title generator. You output ONLY a thread title."})
    opencode = sample("chat_opencode_turn4")[0]
    assert WIRE.translate(title, opencode).origin.kind == "side"
    child = {**opencode, "x-parent-session-id": "a", "x-session-id": "b"}
    assert WIRE.translate(body(), child).origin == Origin("subagent", "b")
    assert WIRE.translate(body(), {}).origin == Origin()


def test_sampling_parameters_of_a_client_change_nothing():
    sampling = {
        "temperature": 0,
        "top_p": 0.1,
        "top_k": 1,
        "seed": 3,
        "logprobs": True,
        "logit_bias": {"1": 5},
    }
    assert translate(**sampling) == translate()


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"n": 2}, "n: "),
        ({"messages": []}, "messages: "),
        ({"messages": "hi"}, "messages: expected a list, got text"),
        (
            {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]},
            "messages[0].content[0].type: ",
        ),
        ({"messages": [{"role": "robot"}]}, "messages[0].role: "),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id: "),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"id": "a"}]}]},
            "messages[0].tool_calls[0].function: ",
        ),
        ({"max_tokens": "many"}, "max_tokens: expected an integer, got text"),
        ({"max_tokens": 0}, "max_tokens: "),
        ({"stop": [""]}, "stop[0]: "),
        ({"stream": "yes"}, "stream: "),
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools[0].function: "),
        ({"tool_choice": "required"}, "tool_choice: "),
        ({"tool_choice": {"type": "function", "function": {"name": "gone"}}}, "tool_choice.function.name: "),
        ({"functions": [{"name": "f"}]}, "functions: "),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(fields, named):
    assert refused(**fields).startswith(named)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_any_body_gives_a_request_or_a_refusal(data):
    name = data.draw(st.sampled_from([*SAMPLES, "smolagents_turn2"]))
    raw = sample(f"chat_{name}")[1]
    place = data.draw(st.sampled_from(sorted(places(raw), key=repr)))
    try:
        request = WIRE.translate(replaced(raw, place, data.draw(anything)), {})
    except AdapterError as error:
        assert error.kind == "invalid_request"
        json.dumps(WIRE.error(error)[1])
    else:
        assert isinstance(request, ModelRequest)
        assert all(isinstance(match_key(message), int) for message in request.messages)


def joined(stream):
    """The message that the deltas of a stream join to."""
    message = {"content": "", "reasoning_content": "", "tool_calls": []}
    for chunk in data_of(stream):
        for choice in chunk["choices"]:
            delta = choice["delta"]
            message["content"] += delta.get("content", "")
            message["reasoning_content"] += delta.get("reasoning_content", "")
            for piece in delta.get("tool_calls", ()):
                if "id" in piece:
                    message["tool_calls"].append({**piece, "function": {**piece["function"]}})
                else:
                    known = message["tool_calls"][piece["index"]]["function"]
                    known["arguments"] += piece["function"]["arguments"]
    return message


@settings(max_examples=100, deadline=None)
@given(outputs, st.integers(1, 5))
def test_deltas_join_to_the_whole_body_in_any_chunking(output, size):
    writer = WIRE.writer(translate())
    got = joined(written(writer, events_of(output, size)))
    whole = writer.whole(STOP)["choices"][0]["message"]
    assert (got["content"] or None) == (whole["content"] or None)
    assert got["reasoning_content"] == whole.get("reasoning_content", "")
    calls = [{name: call[name] for name in ("id", "type", "function")} for call in got["tool_calls"]]
    assert calls == whole.get("tool_calls", [])
    assert [call["function"]["arguments"] for call in calls] == [
        text for kind, text in output if kind not in ("text", "reasoning")
    ]


def test_every_call_is_sent_with_an_id_of_its_own_and_arguments_as_sampled():
    writer = WIRE.writer(translate())
    written(writer, events_of(OUTPUT))
    choice = writer.whole(STOP)["choices"][0]
    assert [call["id"] for call in choice["message"]["tool_calls"]] == writer.tool_ids == writer.handles
    assert [call["function"]["arguments"] for call in choice["message"]["tool_calls"]] == [
        OUTPUT[2][1],
        '{"bad',
    ]
    assert all(len(name) == len("call_") + 24 for name in writer.tool_ids)
    assert choice["finish_reason"] == "tool_calls"


@pytest.mark.parametrize(
    ("output", "ending", "finish", "content"),
    [
        ([("text", "x")], STOP, "stop", "x"),
        ([], STOP, "stop", ""),
        ([("text", "x")], LENGTH, "length", "x"),
        ([("run", "{}")], STOP, "tool_calls", None),
        ([("run", "{")], LENGTH, "length", None),
    ],
)
def test_finish_reason_and_content(output, ending, finish, content):
    writer = WIRE.writer(translate())
    last = [chunk for chunk in data_of(written(writer, events_of(output), ending)) if chunk["choices"]][-1]
    choice = writer.whole(ending)["choices"][0]
    assert choice["finish_reason"] == last["choices"][0]["finish_reason"] == finish
    assert choice["message"]["content"] == content


def test_a_stream_opens_at_once_and_can_be_kept_open():
    writer = WIRE.writer(translate())
    assert data_of(writer.begin(USAGE))[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert data_of(writer.keepalive())[0]["choices"][0]["delta"] == {}


def test_usage_is_sent_where_it_was_asked_for():
    plain = written(WIRE.writer(translate(stream=True)), [])
    asked = written(WIRE.writer(translate(stream=True, stream_options={"include_usage": True})), [])
    assert all("usage" not in chunk for chunk in data_of(plain))
    assert data_of(asked)[-1]["usage"] == {
        "prompt_tokens": 7,
        "completion_tokens": 5,
        "total_tokens": 12,
        "prompt_tokens_details": {"cached_tokens": 3},
        "completion_tokens_details": {"reasoning_tokens": 2},
    }
    assert asked.endswith(b"data: [DONE]\n\n")


def test_a_failure_in_the_midst_does_not_look_like_an_end():
    sent = WIRE.writer(translate()).error(AdapterError("upstream", "engine died"))
    assert data_of(sent)[0]["error"]["message"] == "engine died"
    assert b"[DONE]" not in sent


def test_a_failure_in_the_midst_is_a_cut_for_clients_that_ask_again_only_then():
    qwen_code = sample("chat_qwen_code_turn4")[0]
    writer = WIRE.writer(WIRE.translate(body(), qwen_code))
    assert writer.error(AdapterError("upstream", "engine died")) == b""
    assert data_of(writer.error(AdapterError("closed", "too late")))[0]["error"]["code"] == "session_closed"


@pytest.mark.parametrize(
    ("kind", "status", "code"),
    [
        ("authentication", 401, "invalid_api_key"),
        ("invalid_request", 400, None),
        ("context_overflow", 400, "context_length_exceeded"),
        ("rate_limit", 429, "rate_limit_exceeded"),
        ("overloaded", 503, "service_unavailable"),
        ("upstream", 500, "server_error"),
        ("not_found", 404, "not_found"),
        ("too_large", 413, "request_too_large"),
        ("closed", 403, "session_closed"),
    ],
)
def test_errors_have_openais_shape(kind, status, code):
    got, refusal = WIRE.error(AdapterError(kind, "so it is"))
    assert (got, refusal["error"]["code"]) == (status, code)
    assert set(refusal["error"]) == {"message", "type", "param", "code"}
    assert refusal["error"]["message"].startswith("so it is")


def test_a_refused_field_is_the_param_of_the_error():
    with pytest.raises(AdapterError) as caught:
        translate(n=2)
    assert WIRE.error(caught.value)[1]["error"]["param"] == "n"


def test_the_sdk_reads_streams_bodies_and_errors():
    openai = pytest.importorskip("openai")
    ask = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "tools": [TOOL]}
    with served(WIRE, OUTPUT) as server:
        client = openai.OpenAI(base_url=server.url, api_key="k", max_retries=0)
        whole = client.chat.completions.create(**ask)
        with client.chat.completions.stream(**ask, stream_options={"include_usage": True}) as stream:
            streamed = stream.get_final_completion()
        server.error = AdapterError("authentication", "unknown session")
        with pytest.raises(openai.AuthenticationError, match="unknown session"):
            client.chat.completions.create(**ask)
    type(whole).model_validate(whole.to_dict(), strict=True)
    for completion in (whole, streamed):
        message = completion.choices[0].message
        assert (message.content, message.reasoning_content) == ("I look.", "Let me see.")
        assert [call.function.arguments for call in message.tool_calls] == [OUTPUT[2][1], '{"bad']
        assert completion.usage.prompt_tokens_details.cached_tokens == 3
        assert completion.choices[0].finish_reason == "tool_calls"


def test_the_sdk_sends_its_turn_back_with_the_ids_that_it_was_given():
    openai = pytest.importorskip("openai")
    with served(WIRE, OUTPUT) as server:
        client = openai.OpenAI(base_url=server.url, api_key="k", max_retries=0)
        history = [{"role": "user", "content": "hi"}]
        message = client.chat.completions.create(model="m", messages=history).choices[0].message
        results = [{"role": "tool", "tool_call_id": call.id, "content": "ok"} for call in message.tool_calls]
        client.chat.completions.create(model="m", messages=[*history, message, *results])
        turn = server.requests[1].messages[1]
    assert handles_of(turn) == tuple(call.id for call in message.tool_calls)
    assert [call["function"]["arguments"] for call in turn["tool_calls"]] == [{"b": 1, "a": "é"}, '{"bad']


def test_an_empty_answer_that_another_follows_broke_off():
    user, empty, answer = (
        {"role": role, "content": text}
        for role, text in (("user", "Hi"), ("assistant", ""), ("assistant", "Yes"))
    )
    assert translate(user, empty, answer, user).messages == translate(user, answer, user).messages
    assert len(translate(user, empty, user).messages) == 3

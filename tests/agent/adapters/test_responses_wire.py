"""Responses: what clients send in the common form, and the answer with its full set of events."""

import json
import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from slime.agent.adapters.freeform import FreeformInput
from slime.agent.adapters.responses_wire import ResponsesWire
from slime.agent.adapters.wire import AdapterError, ModelRequest, Origin
from slime.agent.messages import HANDLES, handles_of, match_key
from tests.agent.adapters.wires import (
    LENGTH,
    STOP,
    USAGE,
    anything,
    data_of,
    events_of,
    outputs,
    pieces,
    places,
    replaced,
    sample,
    served,
    texts,
    written,
)

WIRE = ResponsesWire()
SAMPLES = ("codex_turn4", "codex_custom_tool", "codex_subagent", "opencode_turn4", "openai_agents_turn4")
TOOLS = [
    {"type": "function", "name": "run", "parameters": {"type": "object", "properties": {}}},
    {
        "type": "custom",
        "name": "free",
        "format": {"type": "grammar", "syntax": "lark", "definition": "start: X"},
    },
    {
        "type": "namespace",
        "name": "box",
        "description": "A box.",
        "tools": [{"type": "function", "name": "open"}],
    },
    {"type": "web_search"},
]
CODEX = {"originator": "codex_exec", "User-Agent": "codex_exec/0.171.0"}
OUTPUT = [
    ("reasoning", "Let me see."),
    ("text", "I look."),
    ("run", '{"b": 1, "a": "é"}'),
    ("box.open", '{"bad'),
    ("free", json.dumps({"input": 'say "é"\n'})),
]


def translate(*items, headers=None, **fields):
    given = {"input": list(items) or "hi", "tools": TOOLS, **fields}
    return WIRE.translate(given, headers or {})


def refused(**fields):
    with pytest.raises(AdapterError) as caught:
        translate(**fields)
    assert caught.value.kind == "invalid_request"
    return caught.value.message


def answered(output=OUTPUT, ending=STOP, **fields):
    """A writer that has written an answer, its events, and its body."""
    writer = WIRE.writer(translate(**fields))
    events = data_of(written(writer, events_of(output, 3), ending))
    return writer, events, writer.whole(ending)


def reasoning(stem=None, **fields):
    ids = {"id": f"rs_{stem}00000000", "encrypted_content": f"enc_{stem}{'0' * 32}"} if stem else {}
    return {"type": "reasoning", "summary": [], **ids, **fields}


def call(call_id, name="run", **fields):
    return {"type": "function_call", "call_id": call_id, "name": name, "arguments": "{}", **fields}


def result(call_id):
    return {"type": "function_call_output", "call_id": call_id, "output": "ok"}


@pytest.mark.parametrize("name", SAMPLES)
def test_turns_of_every_client_are_one_message_each_with_all_their_handles(name):
    headers, raw = sample(f"responses_{name}")
    request = WIRE.translate(raw, headers)
    turns = [message for message in request.messages if message["role"] == "assistant"]
    results = [message["tool_call_id"] for message in request.messages if message["role"] == "tool"]
    assert [turn["tool_calls"][0]["id"] for turn in turns] == results
    minted = re.findall(r'"((?:rs|msg|fc|ctc|enc|call)_[0-9a-f]{24,48})"', json.dumps(raw))
    assert {handle for turn in turns for handle in handles_of(turn)} == set(minted)
    for number, turn in enumerate(turns):
        assert all(f"_{number:016x}" in handle for handle in handles_of(turn))


def test_codex_history_has_its_messages_in_order():
    headers, raw = sample("responses_codex_subagent")
    request = WIRE.translate(raw, headers)
    assert [message["role"] for message in request.messages] == [
        *("system", "system", "user", "user"),
        *("assistant", "tool", "assistant", "tool", "user"),
    ]
    turn = request.messages[4]
    assert (turn["content"], turn["reasoning_content"]) == ("I will look.", "Let me see.")
    assert turn["tool_calls"][0]["function"]["name"] == "multi_agent_v1.spawn_agent"
    names = [tool["function"]["name"] for tool in request.tools]
    assert names == ["exec_command", "write_stdin", "multi_agent_v1.spawn_agent", "multi_agent_v1.wait_agent"]


def test_a_custom_tool_is_a_function_of_one_text():
    headers, raw = sample("responses_codex_custom_tool")
    request = WIRE.translate(raw, headers)
    patch = next(tool["function"] for tool in request.tools if tool["function"]["name"] == "apply_patch")
    assert patch["parameters"]["required"] == ["input"]
    assert "lark grammar" in patch["description"]
    calls = [call["function"] for message in request.messages for call in message.get("tool_calls", ())]
    assert calls[-1] == {"name": "apply_patch", "arguments": {"input": "*** Begin Patch\n*** End Patch"}}


def test_the_origin_is_told_from_headers():
    headers, raw = sample("responses_codex_compaction")
    request = WIRE.translate(raw, {**headers, "x-codex-turn-metadata": '{"request_kind": "compaction"}'})
    assert (request.tools, request.tool_choice, request.origin.kind) == ([], "auto", "compaction")
    child = {**headers, "x-openai-subagent": "collab_spawn", "thread-id": "b"}
    assert WIRE.translate(raw, child).origin == Origin("subagent", "b")
    shape = {"format": {"type": "json_schema", "name": "title", "schema": {}}}
    assert translate(text=shape, headers=headers).origin == Origin("main", "main")


def test_instructions_lead_and_a_chain_that_goes_on_has_them_already():
    begun = translate(instructions="Be brief.")
    assert [message["role"] for message in begun.messages] == ["system", "user"]
    going = translate(instructions="Be brief.", previous_response_id="resp_1")
    assert going.continues == "resp_1"
    assert [message["role"] for message in going.messages] == ["user"]


def test_items_of_one_turn_between_the_outputs_of_its_calls_are_one_message():
    one, two = (f"call_{'a' * 16}0000000{number}" for number in (1, 2))
    request = translate(reasoning("a" * 16), call(one), result(one), call(two), result(two))
    assert [message["role"] for message in request.messages] == ["assistant", "tool", "tool"]
    assert [made["id"] for made in request.messages[0]["tool_calls"]] == [one, two]


def test_items_of_an_answer_that_broke_off_are_left_out():
    asked, cut = {"role": "user", "content": "Hi"}, reasoning("a" * 16)
    assert translate(asked, cut).messages == translate(asked).messages
    request = translate(asked, cut, reasoning("b" * 16), {"role": "assistant", "content": "x"}, asked)
    assert [message["role"] for message in request.messages] == ["user", "assistant", "user"]
    assert request.messages[1]["content"] == "x"
    assert request.messages[1][HANDLES] == ["rs_" + "b" * 16 + "00000000", "enc_" + "b" * 16 + "0" * 32]


def test_turns_that_follow_each_other_stay_apart():
    foreign = translate(call("one"), result("one"), call("two"), result("two"))
    assert [message["role"] for message in foreign.messages] == ["assistant", "tool", "assistant", "tool"]


def test_other_items_of_a_history():
    request = translate(
        {"role": "user", "content": [{"type": "input_image", "image_url": "data:,x"}]},
        {"type": "web_search_call", "id": "ws_1", "status": "completed"},
        {"type": "item_reference", "id": "rs_1"},
        {
            "type": "local_shell_call",
            "id": "l1",
            "call_id": "c1",
            "action": {"type": "exec", "command": ["ls"]},
        },
        {"type": "local_shell_call_output", "id": "c1", "output": "a.py"},
        {"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
    )
    assert [message["role"] for message in request.messages] == ["user", "assistant", "tool", "assistant"]
    assert request.messages[0]["content"] == [{"type": "image_url", "image_url": {"url": "data:,x"}}]
    assert handles_of(request.messages[1]) == ("rs_1", "l1", "c1")
    assert request.messages[1]["tool_calls"][0]["function"]["name"] == "local_shell"
    assert request.messages[3]["content"] == "no"


def test_names_of_tools_are_unique_and_lead_back():
    twins = [
        {"type": "namespace", "name": "a", "tools": [{"type": "function", "name": "b"}]},
        {"type": "function", "name": "a.b"},
        {"type": "custom", "name": "a.b"},
    ]
    request = translate(call("c", name="b", namespace="a"), tools=twins)
    names = [tool["function"]["name"] for tool in request.tools]
    assert names == ["a.b_", "a.b", "a.b__"]
    assert request.messages[0]["tool_calls"][0]["function"]["name"] == "a.b_"
    writer = WIRE.writer(request)
    written(writer, events_of([(name, "{}") for name in names]))
    calls = [(item["type"], item.get("namespace"), item["name"]) for item in writer.whole(STOP)["output"]]
    assert calls == [
        ("function_call", "a", "b"),
        ("function_call", None, "a.b"),
        ("custom_tool_call", None, "a.b"),
    ]


def test_limits_and_choices():
    assert translate(max_output_tokens=5).max_tokens == 5
    assert translate(tool_choice="required").tool_choice == "required"
    assert translate(tool_choice={"type": "function", "name": "run"}).tool_choice == "run"
    assert translate(tool_choice={"type": "custom", "name": "free"}).tool_choice == "free"
    nested = {"type": "function", "name": "open", "namespace": "box"}
    assert translate(tool_choice=nested).tool_choice == "box.open"
    allowed = translate(tool_choice={"type": "allowed_tools", "mode": "required", "tools": [nested]})
    assert allowed.tool_choice == "required"
    assert [tool["function"]["name"] for tool in allowed.tools] == ["box.open"]
    assert translate(parallel_tool_calls=False).parallel_tool_calls is False


def test_sampling_parameters_of_a_client_change_nothing():
    assert translate(temperature=0, top_p=0.1, top_logprobs=3) == translate()


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"input": []}, "input: "),
        ({"input": None}, "input: "),
        ({"input": 3}, "input: expected a list, got a number"),
        (
            {"input": [{"type": "message", "role": "user", "content": [{"type": "input_file"}]}]},
            "input[0].content[0]",
        ),
        ({"input": [{"type": "program"}]}, "input[0].type: items of type 'program'"),
        ({"input": [{"type": "function_call", "name": "x"}]}, "input[0].call_id: "),
        ({"max_output_tokens": -1}, "max_output_tokens: "),
        ({"tools": [{"type": "function"}]}, "tools[0].name: "),
        ({"tool_choice": {"type": "file_search"}}, "tool_choice.type: "),
        ({"tool_choice": {"type": "function", "name": "gone"}}, "tool_choice.name: "),
        ({"tools": [], "tool_choice": "required"}, "tool_choice: "),
        ({"background": True}, "background: "),
        ({"conversation": "conv_1"}, "conversation: "),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(fields, named):
    assert refused(**fields).startswith(named)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_any_body_gives_a_request_or_a_refusal(data):
    raw = sample(f"responses_{data.draw(st.sampled_from(SAMPLES))}")[1]
    place = data.draw(st.sampled_from(sorted(places(raw), key=repr)))
    try:
        request = WIRE.translate(replaced(raw, place, data.draw(anything)), {})
    except AdapterError as error:
        assert error.kind == "invalid_request"
        json.dumps(WIRE.error(error)[1])
    else:
        assert isinstance(request, ModelRequest)
        assert all(isinstance(match_key(message), int) for message in request.messages)
        written(WIRE.writer(request), events_of(OUTPUT))


def nameless(value):
    """Ids of one kind made equal."""
    return json.loads(re.sub(r"\b(resp|rs|msg|fc|ctc|call|enc)_[0-9a-f]{24,48}", r"\1", json.dumps(value)))


@settings(max_examples=100, deadline=None)
@given(outputs, st.integers(1, 5))
def test_the_body_is_the_same_in_any_chunking_and_is_what_the_events_told(output, size):
    writer = WIRE.writer(translate())
    events = data_of(written(writer, events_of(output, size)))
    body = writer.whole(STOP)
    other = WIRE.writer(translate())
    written(other, events_of(output))
    assert nameless({**body, "created_at": 0}) == nameless({**other.whole(STOP), "created_at": 0})
    assert events[-1]["response"] == body
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert sorted(done, key=body["output"].index) == body["output"]
    for place, item in enumerate(body["output"]):
        told = "".join(
            event["delta"] for event in events if "delta" in event and event["output_index"] == place
        )
        said = item["content"][0]["text"] if "content" in item else item.get("arguments", item.get("input"))
        assert told == said


def test_every_event_of_the_full_set_is_sent_in_order():
    kinds = [event["type"].removeprefix("response.") for event in answered()[1]]
    once = [kind for place, kind in enumerate(kinds) if kind != kinds[place - 1]]
    assert once == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done"),
        *("content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.done"),
        *("content_part.done", "output_item.done"),
        *(
            "output_item.added",
            "function_call_arguments.delta",
            "function_call_arguments.done",
            "output_item.done",
        ),
        *(
            "output_item.added",
            "function_call_arguments.delta",
            "function_call_arguments.done",
            "output_item.done",
        ),
        *(
            "output_item.added",
            "custom_tool_call_input.delta",
            "custom_tool_call_input.done",
            "output_item.done",
        ),
        "completed",
    ]


def test_items_carry_what_clients_need_to_run_them():
    writer, events, body = answered()
    output = body["output"]
    assert [item["type"] for item in output] == [
        *("reasoning", "message", "function_call", "function_call", "custom_tool_call")
    ]
    assert output[0]["content"] == [{"type": "reasoning_text", "text": "Let me see."}]
    assert output[2]["arguments"] == OUTPUT[2][1]
    assert (output[3]["namespace"], output[3]["name"], output[3]["arguments"]) == ("box", "open", '{"bad')
    assert "namespace" not in output[2]
    assert output[4]["input"] == 'say "é"\n'
    assert [item["call_id"] for item in output[2:]] == writer.tool_ids
    added = next(event["item"] for event in events if event["type"] == "response.output_item.added")
    assert added["encrypted_content"] == output[0]["encrypted_content"]
    names = [item[name] for item in output for name in ("id", "call_id", "encrypted_content") if name in item]
    assert set(writer.handles) == {*names, body["id"]}
    assert body["usage"]["input_tokens_details"]["cached_tokens"] == 3
    assert body["usage"]["output_tokens_details"]["reasoning_tokens"] == 2


def test_an_empty_answer_is_an_empty_message_that_names_its_turn():
    writer, _, body = answered([])
    assert [(item["type"], item["id"] in writer.handles) for item in body["output"]] == [("message", True)]


def test_reaching_the_limit_is_told_to_all_but_codex():
    _, events, body = answered(OUTPUT[:2], LENGTH)
    assert (events[-1]["type"], body["status"]) == ("response.incomplete", "incomplete")
    assert body["incomplete_details"] == {"reason": "max_output_tokens"}
    assert body["output"][-1]["status"] == "incomplete"
    _, events, body = answered(OUTPUT[:2], LENGTH, headers=CODEX)
    assert (events[-1]["type"], body["status"]) == ("response.completed", "completed")
    assert body["output"][-1]["status"] == "completed"


def test_a_failure_in_the_midst_is_told_to_codex_only_where_another_try_cannot_help():
    overflow, upstream = AdapterError("context_overflow", "too long"), AdapterError("upstream", "engine died")
    for headers, error, code in (
        ({}, upstream, "server_error"),
        ({}, overflow, "context_length_exceeded"),
        (CODEX, overflow, "context_length_exceeded"),
    ):
        event = data_of(WIRE.writer(translate(headers=headers)).error(error))[0]
        assert (event["type"], event["response"]["error"]["code"]) == ("response.failed", code)
    assert WIRE.writer(translate(headers=CODEX)).error(upstream) == b""


def test_a_stream_opens_at_once_and_is_kept_open_by_an_event():
    writer = WIRE.writer(translate())
    assert [event["type"] for event in data_of(writer.begin(USAGE))] == [
        "response.created",
        "response.in_progress",
    ]
    assert [(event["type"], event["sequence_number"]) for event in data_of(writer.keepalive())] == [
        ("response.in_progress", 2)
    ]


def codex(output):
    return output


def opencode(output):
    """Reasoning by its encrypted content alone, calls by their call ids, arguments written anew."""
    for item in output:
        if item["type"] == "reasoning":
            yield {"type": "reasoning", "encrypted_content": item["encrypted_content"], "summary": []}
        elif item["type"] == "message":
            yield {"role": "assistant", "content": item["content"]}
        elif item["type"] == "function_call":
            yield call(item["call_id"], item["name"], arguments=item["arguments"].replace(" ", ""))
        else:
            yield item


def by_reference(output):
    return [{"type": "item_reference", "id": item["id"]} for item in output]


def bare_calls(output):
    """Each call before its own result, nothing else."""
    for item in output:
        if "call_id" in item:
            yield item
            yield result(item["call_id"])


@pytest.mark.parametrize("client", [codex, opencode, by_reference, bare_calls])
def test_a_turn_comes_back_from_every_client_as_one_message_with_its_handles(client):
    writer, _, body = answered()
    request = translate(
        {"role": "user", "content": "hi"}, *client(body["output"]), result(writer.tool_ids[0])
    )
    turns = [message for message in request.messages if message["role"] == "assistant"]
    assert len(turns) == 1
    assert handles_of(turns[0])
    assert set(handles_of(turns[0])) <= set(writer.handles)


def test_a_turn_of_text_alone_says_the_same_when_it_comes_back():
    _, _, body = answered([("text", "All done.")])
    again = translate(*body["output"], {"role": "user", "content": "More."}).messages[0]
    assert match_key(again) == match_key({"role": "assistant", "content": "All done."})


@settings(max_examples=200, deadline=None)
@given(
    st.one_of(texts, texts.map(lambda text: json.dumps({"input": text}))),
    st.integers(0, 8),
    st.integers(1, 7),
)
@example('{"input": "\\ud83d\\ude00 \\ud83d \\n \\x"}', 0, 1)
@example('{"a": 1, "input": "x"}', 0, 2)
@example(" " * 80 + '{"input": "x"}', 0, 1)
def test_free_text_is_the_same_however_its_json_was_cut(arguments, cut_off, size):
    arguments = arguments[: len(arguments) - cut_off]

    def given(size):
        reader = FreeformInput()
        parts = [reader.feed(piece) for piece in pieces(arguments, size)]
        assert "".join([*parts, reader.finish(arguments)]) == reader.text
        return reader.text

    assert given(size) == given(1000)
    try:
        assert given(size) == json.loads(arguments)["input"].replace("\ud83d", "\N{REPLACEMENT CHARACTER}")
    except (json.JSONDecodeError, TypeError, KeyError):
        return


def test_the_sdk_reads_streams_bodies_and_errors():
    openai = pytest.importorskip("openai")
    ask = {"model": "m", "input": "hi", "tools": TOOLS}
    with served(WIRE, OUTPUT) as server:
        client = openai.OpenAI(base_url=server.url, api_key="k", max_retries=0)
        whole = client.responses.create(**ask)
        with client.responses.stream(**ask) as stream:
            kinds = {event.type for event in stream}
            streamed = stream.get_final_response()
        server.error = AdapterError("context_overflow", "prompt is too long: 9 tokens > 8 maximum")
        with pytest.raises(openai.BadRequestError, match="exceeds the context window"):
            client.responses.create(**ask)
    assert "response.reasoning_text.delta" in kinds
    type(whole).model_validate(whole.to_dict(), strict=True)
    for response in (whole, streamed):
        assert response.output_text == "I look."
        assert response.output[-1].input == 'say "é"\n'
        assert response.output[-2].namespace == "box"
        assert response.usage.total_tokens == 12


def test_every_event_is_one_that_the_sdk_knows():
    pytest.importorskip("openai")
    from openai.types.responses import ResponseStreamEvent
    from pydantic import TypeAdapter

    event_model = TypeAdapter(ResponseStreamEvent)
    for ending in (STOP, LENGTH):
        writer, events, _ = answered(ending=ending)
        for event in [
            *events,
            *data_of(writer.keepalive()),
            *data_of(writer.error(AdapterError("upstream", "x"))),
        ]:
            assert event_model.validate_python(event, strict=True).type == event["type"]


def test_the_sdk_sends_its_turn_back_with_every_handle():
    openai = pytest.importorskip("openai")
    with served(WIRE, OUTPUT) as server:
        client = openai.OpenAI(base_url=server.url, api_key="k", max_retries=0)
        first = client.responses.create(model="m", input="hi", tools=TOOLS)
        history = [{"role": "user", "content": "hi"}, *first.output]
        results = [result(item.call_id) for item in first.output if item.type == "function_call"]
        client.responses.create(model="m", input=[*history, *results], tools=TOOLS)
        client.responses.create(model="m", input=results, tools=TOOLS, previous_response_id=first.id)
        _, replayed, going = server.requests
    turn = replayed.messages[1]
    assert (turn["content"], turn["reasoning_content"]) == ("I look.", "Let me see.")
    names = [item.id for item in first.output] + [item.call_id for item in first.output[2:]]
    assert {*names, first.output[0].encrypted_content} == set(handles_of(turn))
    calls = [made["function"] for made in turn["tool_calls"]]
    assert [made["name"] for made in calls] == ["run", "box.open", "free"]
    assert calls[0]["arguments"] == {"b": 1, "a": "é"}
    assert calls[2]["arguments"] == {"input": 'say "é"\n'}
    assert going.continues == first.id
    assert [message["role"] for message in going.messages] == ["tool", "tool"]

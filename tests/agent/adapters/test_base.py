"""Sessions, errors, limits, retries and cancellation, the same for every protocol."""

import asyncio
import http.client
import json
import socket
import threading
import time
import urllib.parse

import pytest

from slime.agent.adapters import OpenAIAdapter
from slime.errors import ConfigError
from slime.serving.scripted import ScriptedAnswer
from slime.utils.types import Sample
from tests.agent.kit import SID, TOOL, events, read_until, served

CHAT = "/v1/chat/completions"


def ask(text="hello", **fields):
    return {"messages": [{"role": "user", "content": text}]} | fields


def wait_for(condition, seconds=10.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "did not happen in time"
        time.sleep(0.01)


def start(server, body, *, sid=SID, path=CHAT):
    """A request whose answer is not read yet."""
    address = urllib.parse.urlsplit(server.url)
    connection = http.client.HTTPConnection(address.hostname, address.port, timeout=30)
    headers = {"Authorization": f"Bearer {sid}", "Content-Type": "application/json"}
    connection.request("POST", path, json.dumps(body), headers)
    return connection


def tokens_trained(samples):
    return sum(sum(sample.loss_mask) for sample in samples)


@pytest.mark.parametrize(
    ("path", "headers", "fields"),
    [
        (f"/s/{SID}{CHAT}", {}, {}),
        (CHAT, {"Authorization": f"Bearer {SID}"}, {}),
        (CHAT, {"authorization": f"bearer {SID}"}, {}),
        (CHAT, {"X-Api-Key": SID}, {}),
        (CHAT, {}, {"metadata": {"session_id": SID}}),
        (CHAT, {}, {"user": SID}),
    ],
)
def test_a_session_is_named_by_path_header_or_body(path, headers, fields):
    with served(OpenAIAdapter, ["hi"]) as server:
        status, _ = server.post(path, ask(**fields), sid=None, headers=headers)
        assert status == 200
        assert tokens_trained(server.finish()) == len(server.sampled[0])


@pytest.mark.parametrize("sid", [None, "", "other", SID + "x", f"../{SID}"])
def test_who_names_no_open_session_gets_401(sid):
    with served(OpenAIAdapter, ["hi"]) as server:
        status, body = server.post(CHAT, ask(), sid=sid)
        assert status == 401
        assert body["error"]["code"] == "invalid_api_key"
        assert server.engine.calls == []


def test_unknown_sessions_are_opened_where_that_is_wanted():
    with served(OpenAIAdapter, ["hi"], sid=None, allow_unknown_sessions=True) as server:
        assert server.post(CHAT, ask(), sid="new")[0] == 200
        assert len(server.finish("new")) == 1


def test_a_session_is_opened_and_finished_once():
    with served(OpenAIAdapter, ["hi"]) as server:
        with pytest.raises(ValueError, match="exists already"):
            server.adapter.open_session(SID)
        assert server.finish() == []
        with pytest.raises(ValueError, match="is not open"):
            server.finish()
        with pytest.raises(ValueError, match="is closed"):
            server.adapter.open_session(SID)
        assert server.post(CHAT, ask())[0] == 403


def test_sessions_do_not_see_each_other():
    with served(OpenAIAdapter, ["one", "two"]) as server:
        server.adapter.open_session("b")
        server.post(CHAT, ask("x"))
        server.post(CHAT, ask("x"), sid="b")
        (first,), (second,) = server.finish(), server.finish("b")
    assert "one" in first.response and "two" in second.response


def test_a_dropped_session_gives_nothing():
    with served(OpenAIAdapter, ["one"]) as server:
        server.post(CHAT, ask("x"))
        asyncio.run(server.adapter.drop_session(SID))
        assert not server.adapter.manager.has_session(SID)


def test_law_7_sampling_parameters_belong_to_the_session():
    session = {"sampling_defaults": {"temperature": 0.7, "top_p": 0.9, "max_new_tokens": 50}}
    with served(OpenAIAdapter, ["a", "b"], session=session) as server:
        server.post(CHAT, ask(temperature=0, top_p=0.1, top_k=3, max_tokens=10_000, seed=1))
        server.post(CHAT, ask("other", max_tokens=5))
        first, second = (call.params for call in server.engine.calls)
    assert (first.temperature, first.top_p, first.max_new_tokens) == (0.7, 0.9, 50)
    assert second.max_new_tokens == 5


def test_the_context_bounds_the_answer_and_refuses_a_longer_prompt():
    with served(OpenAIAdapter, ["x" * 500], session={"max_context_tokens": 100}) as server:
        status, body = server.post(CHAT, ask("y"))
        assert status == 200
        assert body["choices"][0]["finish_reason"] == "length"
        assert body["usage"]["total_tokens"] == 100
        status, body = server.post(CHAT, ask("z" * 200))
        assert status == 400
        assert body["error"]["code"] == "context_length_exceeded"
        assert "tokens > 100 maximum" in body["error"]["message"]


def test_past_the_turn_cap_a_session_gets_429():
    with served(OpenAIAdapter, ["a", "b"], max_turns_per_sid=1) as server:
        assert server.post(CHAT, ask())[0] == 200
        assert server.post(CHAT, ask("again"))[0] == 429
        assert len(server.engine.calls) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_or_a_closing_answer_that_is_not_recorded(stream):
    with served(OpenAIAdapter, ["a"], max_turns_per_sid=1, turn_cap_reply="final_turn") as server:
        server.post(CHAT, ask())
        status, raw, _ = server.raw(CHAT, ask("again", stream=stream))
        assert status == 200
        assert b"turn limit" in raw and b'"stop"' in raw
        assert tokens_trained(server.finish()) == len(server.sampled[0])


def test_an_unknown_kind_of_cap_is_refused():
    with (
        pytest.raises(ConfigError, match="turn_cap_reply"),
        served(OpenAIAdapter, [], turn_cap_reply="final"),
    ):
        pass


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"{", "not JSON"),
        (b"[]", "must be a JSON object"),
        (b'{"messages": 3}', "messages"),
        (b'{"messages": []}', "messages"),
        (b'{"messages": [{"role": "assistant", "content": "x"}]}', "messages: the last one"),
        (b'{"messages": [{"role": "robot", "content": "x"}]}', "messages[0].role"),
        (
            b'{"messages": [{"role": "user", "content": [{"type": "image_url",'
            b' "image_url": {"url": "x"}}]}]}',
            "messages[0] holds an image",
        ),
    ],
)
def test_bad_bodies_are_400_and_name_the_field(body, words):
    with served(OpenAIAdapter, []) as server:
        status, answer = server.post(CHAT, body)
        assert status == 400
        assert words in answer["error"]["message"]


def test_an_oversized_body_is_413(monkeypatch):
    monkeypatch.setattr("slime.agent.adapters.base.BODY_BYTES", 1000)
    with served(OpenAIAdapter, []) as server:
        status, answer = server.post(CHAT, ask("x" * 2000))
        assert status == 413
        assert "larger than" in answer["error"]["message"]


def test_a_slow_body_is_given_up(monkeypatch):
    monkeypatch.setattr("slime.agent.adapters.http.BODY_SECONDS", 0.2)
    with served(OpenAIAdapter, []) as server:
        address = urllib.parse.urlsplit(server.url)
        with socket.create_connection((address.hostname, address.port), timeout=10) as connection:
            head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{{"
            connection.sendall(head.encode())
            assert b" 400 " in connection.recv(1000)


def test_too_many_requests_at_once_are_refused():
    released = threading.Event()
    with served(OpenAIAdapter, lambda call: released.wait(30) and "a", max_concurrent_requests=1) as server:
        first = start(server, ask())
        wait_for(lambda: server.engine.calls)
        status, body = server.post(CHAT, ask("other"))
        released.set()
        assert status == 503
        assert "too many" in body["error"]["message"]
        assert first.getresponse().status == 200


@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_failure_has_the_protocols_shape(stream):
    broken = ScriptedAnswer(error=(500, "out of memory"))
    with served(OpenAIAdapter, lambda call: broken) as server:
        status, raw, _ = server.raw(CHAT, ask(stream=stream))
        assert status == 500
        assert "out of memory" in json.loads(raw)["error"]["message"]
        assert server.finish() == []


def test_a_failure_in_mid_stream_is_an_error_event():
    slow = ScriptedAnswer(text="abcdef", token_latency=60)
    with served(OpenAIAdapter, lambda call: slow) as server:
        response = start(server, ask(stream=True)).getresponse()
        assert response.status == 200
        raw = read_until(response, b'"content":"a')
        server.engine.on_death()
        assert "error" in events(raw + response.read())[-1][1]
        assert server.finish() == []


def test_what_a_failing_engine_sampled_is_counted_as_abandoned():
    slow = ScriptedAnswer(text="abcdef", token_latency=60)
    with served(OpenAIAdapter, lambda call: slow) as server:
        response = start(server, ask(stream=True)).getresponse()
        raw = read_until(response, b'"content":"a')
        server.engine.shutdown()
        assert "shut down" in events(raw + response.read())[-1][1]["error"]["message"]
        assert server.finish() == []
        assert server.adapter.manager.totals.tokens_abandoned == server.engine.stats.decode_tokens == 1


def test_text_leaves_while_the_engine_samples():
    slow = ScriptedAnswer(text="abcdefgh" * 20, token_latency=0.1)
    with served(OpenAIAdapter, lambda call: slow) as server:
        response = start(server, ask(stream=True)).getresponse()
        first = read_until(response, b'"content":"a')
        assert server.engine.stats.running == 1
        server.engine.abort_all()
        assert b"[DONE]" not in first
        text = "".join(
            data["choices"][0]["delta"].get("content", "")
            for _, data in events(first + response.read())
            if data["choices"]
        )
        assert text == slow.text[: server.engine.stats.decode_tokens]


def test_a_waiting_client_is_kept(monkeypatch):
    monkeypatch.setattr("slime.agent.adapters.exchange.OPEN_SECONDS", 0.05)
    monkeypatch.setattr("slime.agent.adapters.chat_wire.ChatWire.keepalive_seconds", 0.1)
    released = threading.Event()
    with served(OpenAIAdapter, lambda call: released.wait(30) and "a") as server:
        response = start(server, ask(stream=True)).getresponse()
        read_until(response, b"data: ", 5)
        released.set()
        assert b'"content":"a"' in response.read()


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_aborts_the_engines_request(stream):
    slow = ScriptedAnswer(text="x" * 1000, token_latency=0.05)
    with served(OpenAIAdapter, lambda call: slow) as server:
        connection = start(server, ask(stream=stream))
        if stream:
            connection.getresponse().read1()
        wait_for(lambda: server.engine.stats.running == 1)
        connection.sock.shutdown(socket.SHUT_RDWR) if connection.sock else None
        connection.close()
        wait_for(lambda: server.engine.stats.running == 0)
        assert any(event.startswith("abort:") for event in server.engine.events)
        assert server.finish() == []


def test_an_answer_that_was_not_taken_is_given_again_to_who_asks_again():
    with served(OpenAIAdapter, ["only one"]) as server:
        first = server.post(CHAT, ask())[1]
        again = server.post(CHAT, ask(), headers={"X-Stainless-Retry-Count": "1"})[1]
        assert len(server.engine.calls) == 1
        assert again["choices"][0]["message"]["content"] == first["choices"][0]["message"]["content"]
        assert again["usage"] == first["usage"]
        assert tokens_trained(server.finish()) == len(server.sampled[0])


def test_a_retry_that_overtakes_its_request_waits_for_it():
    with served(OpenAIAdapter, [ScriptedAnswer(text="slow", delay=0.4)]) as server:
        first = start(server, ask())
        wait_for(lambda: server.engine.calls)
        status, again = server.post(CHAT, ask(), headers={"X-Stainless-Retry-Count": "1"})
        assert (status, again["choices"][0]["message"]["content"]) == (200, "slow")
        assert first.getresponse().status == 200
        assert len(server.engine.calls) == 1


def test_a_call_of_a_repeated_answer_is_known_by_its_new_id():
    call = '<think>\n\n</think>\n\n<tool_call>\n{"name": "read", "arguments": {"path": "a"}}\n</tool_call>'
    with served(OpenAIAdapter, [call, "done"]) as server:
        server.post(CHAT, ask(tools=[TOOL]))
        again = server.post(CHAT, ask(tools=[TOOL]), headers={"X-Stainless-Retry-Count": "1"})[1]
        message = again["choices"][0]["message"] | {"content": "changed"}
        result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "r"}
        server.post(CHAT, ask(tools=[TOOL]) | {"messages": [*ask()["messages"], message, result]})
        (sample,) = server.finish()
    assert sum(sample.loss_mask) == sum(map(len, server.sampled))


def test_the_same_prompt_asked_anew_is_sampled_anew():
    with served(OpenAIAdapter, ["one", "two"]) as server:
        for _ in range(2):
            server.post(CHAT, ask())
        assert tokens_trained(server.finish()) == sum(map(len, server.sampled))


def test_finishing_waits_for_what_is_in_flight_then_ends_it():
    answers = [ScriptedAnswer(text="done", delay=0.3), ScriptedAnswer(hang=True)]
    with served(OpenAIAdapter, answers) as server:
        server.adapter.open_session("b")
        slow = start(server, ask())
        wait_for(lambda: len(server.engine.calls) == 1)
        stuck = start(server, ask(), sid="b")
        wait_for(lambda: len(server.engine.calls) == 2)
        assert tokens_trained(server.finish()) == len(server.sampled[0])
        assert server.finish("b", wait_timeout=0.2) == []
        wait_for(lambda: server.engine.stats.running == 0)
        assert slow.getresponse().status == 200
        stuck.close()


def test_the_debug_callback_sees_each_turn_before_it_is_recorded():
    seen = []
    with served(OpenAIAdapter, ["hi"], debug_callback=lambda *turn: seen.append(turn)) as server:
        server.post(CHAT, ask())
    ((sid, messages, tools, answer, turn),) = seen
    assert (sid, messages[0]["content"], list(tools), answer["content"]) == (SID, "hello", [], "hi")
    assert list(turn.output_ids) == server.sampled[0]


def test_stop_strings_end_the_text_and_not_the_tokens():
    with served(OpenAIAdapter, ["one STOP two"]) as server:
        _, body = server.post(CHAT, ask(stop="STOP"))
        assert body["choices"][0]["message"]["content"] == "one"
        (sample,) = server.finish()
    assert sample.response == "one STOP"
    assert sum(sample.loss_mask) == sample.response_length


@pytest.mark.parametrize("path", ["/api/hello", f"/s/{SID}", f"/s/{SID}/api/hello", ""])
def test_probes_are_answered(path):
    with served(OpenAIAdapter, []) as server:
        assert server.raw(path, None, sid=None, method="HEAD")[0] == 200


def test_models_and_unknown_paths():
    with served(OpenAIAdapter, []) as server:
        assert json.loads(server.raw("/v1/models", None, method="GET")[1])["data"][0]["id"] == "slime-actor"
        status, body = server.post("/v1/unknown", {})
        assert (status, body["error"]["type"]) == (404, "invalid_request_error")


def test_law_1_special_tokens_in_messages_are_text_to_the_model():
    with served(OpenAIAdapter, ["ok"]) as server:
        server.post(CHAT, ask("a <|im_end|> b"))
        tokenizer = server.adapter.model.tokenizer
        ids = server.engine.calls[0].input_ids
        assert "a <|im_end|> b" in tokenizer.decode(ids)
        ends = [i for i in ids if i == tokenizer.convert_tokens_to_ids("<|im_end|>")]
        assert len(ends) == 1


def test_a_rollout_gets_its_ids_and_reward():
    with served(OpenAIAdapter, ["ok"]) as server:
        server.post(CHAT, ask())
        base = Sample(index=5, group_index=2, rollout_id=9, label="x", metadata={"k": 1})
        (sample,) = server.finish(base_sample=base, reward=0.5, extra_metadata={"e": 2})
    assert (sample.rollout_id, sample.group_index, sample.index, sample.label) == (9, 2, 5, "x")
    assert (sample.reward, sample.metadata["k"], sample.metadata["e"]) == (0.5, 1, 2)


@pytest.mark.parametrize(
    ("choice", "given", "rest"),
    [
        ("required", "<tool_call>\n", '{"name": "read", "arguments": {"path": "a"}}\n</tool_call>'),
        (
            {"type": "function", "function": {"name": "read"}},
            '<tool_call>\n{"name": "read", "arguments":',
            ' {"path": "a"}}\n</tool_call>',
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_demanded_call_is_begun_for_the_model_and_not_trained(choice, given, rest, stream):
    with served(OpenAIAdapter, [rest]) as server:
        _, raw, _ = server.raw(CHAT, ask(tools=[TOOL], tool_choice=choice, stream=stream))
        assert b'"tool_calls"' in raw
        assert server.engine.calls[0].prompt.endswith(given)
        (sample,) = server.finish()
    assert sample.response == rest + "<|im_end|>"
    assert sample.metadata["use_tool"]
    assert sample.loss_mask == [1] * len(server.sampled[0])


def test_without_a_choice_of_tools_a_call_is_text():
    call = '<tool_call>\n{"name": "read", "arguments": {}}\n</tool_call>'
    with served(OpenAIAdapter, [call]) as server:
        _, body = server.post(CHAT, ask(tools=[TOOL], tool_choice="none"))
    assert body["choices"][0]["message"]["content"] == call


def test_a_demanded_calls_beginning_goes_where_its_turn_goes():
    rest = '{"name": "read", "arguments": {"path": "a"}}\n</tool_call>'
    with served(OpenAIAdapter, [rest, "done"]) as server:
        first = server.post(CHAT, ask(tools=[TOOL], tool_choice="required"))[1]["choices"][0]["message"]
        result = {"role": "tool", "tool_call_id": first["tool_calls"][0]["id"], "content": "r"}
        compacted = [{"role": "user", "content": "summary"}, first, result]
        server.post(CHAT, {"messages": compacted, "tools": [TOOL]})
        assert f"<tool_call>\n{rest}<|im_end|>" in server.engine.calls[1].prompt
        assert tokens_trained(server.finish()) == sum(map(len, server.sampled))


def test_parallel_calls_that_a_client_takes_apart_stand_once():
    calls = "".join(
        f'<tool_call>\n{{"name": "read", "arguments": {{"path": "{path}"}}}}\n</tool_call>\n' for path in "ab"
    )
    with served(OpenAIAdapter, [calls, "done"]) as server:
        message = server.post(CHAT, ask(tools=[TOOL]))[1]["choices"][0]["message"]
        history = ask()["messages"]
        for number, call in enumerate(message["tool_calls"]):
            history.append({"role": "assistant", "content": None, "tool_calls": [call]})
            history.append({"role": "tool", "tool_call_id": call["id"], "content": f"result {number}"})
        server.post(CHAT, {"messages": history, "tools": [TOOL]})
        prompt = server.engine.calls[1].prompt
        assert prompt.count('"path": "a"') == prompt.count("result 0") == prompt.count("result 1") == 1
        (sample,) = server.finish()
    assert sum(sample.loss_mask) == sum(map(len, server.sampled))


def test_who_stops_waiting_for_the_end_of_a_session_does_not_stop_it():
    async def impatient(adapter):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await adapter.finish_session(SID, wait_timeout=0.5)
        await adapter.drop_session(SID)

    with served(OpenAIAdapter, [ScriptedAnswer(hang=True)]) as server:
        stuck = start(server, ask())
        wait_for(lambda: server.engine.calls)
        asyncio.run(impatient(server.adapter))
        wait_for(lambda: server.engine.stats.running == 0)
        assert not server.adapter.manager.has_session(SID)
        stuck.close()


def test_what_a_cancelled_request_sampled_is_counted():
    slow = ScriptedAnswer(text="x" * 2000, token_latency=0.02)
    with served(OpenAIAdapter, [ScriptedAnswer(text="a"), slow]) as server:
        server.post(CHAT, ask())
        stuck = start(server, ask("other", stream=True))
        stuck.getresponse().read1()
        (sample,) = server.finish(wait_timeout=0)
        assert sample.metadata["trajectory"]["tokens_abandoned"] > 0
        stuck.close()


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"stop": 3}, "stop is 3"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids is"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
    ],
)
def test_wrong_sampling_parameters_are_refused_at_once(params, words):
    with (
        pytest.raises(ConfigError, match=words),
        served(OpenAIAdapter, [], session={"sampling_defaults": params}),
    ):
        pass


def test_a_single_stop_string_is_one_and_none_is_none():
    session = {"sampling_defaults": {"stop": "END", "stop_token_ids": None, "top_p": None}}
    with served(OpenAIAdapter, ["the END"], session=session) as server:
        server.post(CHAT, ask(stop=["NOW"]))
        params = server.engine.calls[0].params
    assert list(params.stop) == ["END", "NOW"]


class Barest:
    """All that an adapter may demand of a tokenizer."""

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer

    def apply_chat_template(self, messages, tools=None, tokenize=True, add_generation_prompt=False):
        return self._tokenizer.apply_chat_template(
            messages,
            tools=tools,
            tokenize=tokenize,
            add_generation_prompt=add_generation_prompt,
            return_dict=False,
        )

    def decode(self, ids, skip_special_tokens=False):
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)


def test_a_tokenizer_needs_a_template_and_decode():
    with served(OpenAIAdapter, ["one", "two"], wrap=Barest) as server:
        message = server.post(CHAT, ask())[1]["choices"][0]["message"]
        assert message["content"].startswith("one")
        history = [*ask()["messages"], message, {"role": "user", "content": "more"}]
        server.post(CHAT, {"messages": history})
        assert tokens_trained(server.finish()) == sum(map(len, server.sampled))


def test_without_an_encoder_nothing_goes_on_from_a_response():
    with served(OpenAIAdapter, ["one"], wrap=Barest) as server:
        first = server.post("/v1/responses", {"input": "x"})[1]
        body = {"input": "y", "previous_response_id": first["id"]}
        status, answer = server.post("/v1/responses", body)
        assert status == 404
        assert "send the whole history" in answer["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_callback_that_fails_loses_no_tokens(stream):
    def broken(*turn):
        raise ValueError("callback")

    with served(OpenAIAdapter, ["hi"], debug_callback=broken) as server:
        try:
            status, _, _ = server.raw(CHAT, ask(stream=stream))
        except http.client.HTTPException:
            status = 500
        assert status == 500
        assert server.adapter.manager.turn_count(SID) == 1
        assert server.raw("/healthz", None, method="GET")[0] == 200


def test_the_turn_cap_holds_for_requests_at_once():
    slow = ScriptedAnswer(text="a", delay=0.4)
    with served(OpenAIAdapter, lambda call: slow, max_turns_per_sid=1) as server:
        first = start(server, ask())
        wait_for(lambda: server.engine.calls)
        assert server.post(CHAT, ask("other"))[0] == 429
        assert first.getresponse().status == 200


def test_a_session_can_be_shut_then_graded_then_finished_also_without_its_server():
    with served(OpenAIAdapter, ["a"]) as server:
        server.post(CHAT, ask())
        asyncio.run(server.adapter.shutdown_session(SID))
        assert server.post(CHAT, ask("b"))[0] == 403
        server.handle.stop()
        assert tokens_trained(server.finish()) == len(server.sampled[0])
        with pytest.raises(ValueError, match="is not open"):
            server.finish()


def test_a_demand_that_cannot_be_met_is_told(caplog):
    with served(OpenAIAdapter, ["text"], family="gemma") as server:
        status, _ = server.post(CHAT, ask(tools=[TOOL], tool_choice="required"))
        assert status == 200
        assert server.adapter.counters["undemanded"] == 1
    assert "demands a tool call" in caplog.text

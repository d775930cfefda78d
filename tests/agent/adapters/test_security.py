"""What an unfriendly client may try: others' sessions, others' turns, broken HTTP, slowness, size."""

import gzip
import http.client
import inspect
import json
import socket
import urllib.parse
from contextlib import ExitStack, contextmanager

import pytest

from slime.agent.adapters import AnthropicAdapter, OpenAIAdapter
from slime.agent.aiohttp_threaded import run_app_in_thread, serve_app
from slime.agent.session import new_session_id
from slime.serving.scripted import ScriptedAnswer, start_scripted_server
from tests.agent.adapters.test_base import CHAT, ask, tokens_trained, wait_for
from tests.agent.kit import SID, Served, served
from tests.agent.templates import family_tokenizer

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
SECRET = "the word is swordfish"
THOUGHT = f"<think>\n{SECRET}\n</think>\n\n{SECRET}"
CALL = f'{THOUGHT}\n<tool_call>\n{{"name": "read", "arguments": {{"path": "{SECRET}"}}}}\n</tool_call>'


def address_of(server):
    address = urllib.parse.urlsplit(server.url)
    return address.hostname, address.port


def spoken(server, data):
    """What the server sends back for raw bytes, until it closes."""
    with socket.create_connection(address_of(server), timeout=10) as connection:
        connection.sendall(data)
        answer = b""
        while part := connection.recv(65536):
            answer += part
    return answer


def post(path=CHAT, body=b"", *, headers=""):
    """The bytes of a request of session SID; `headers` end their lines themselves."""
    return f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {SID}\r\n{headers}\r\n".encode() + body


GOOD = json.dumps(ask()).encode()

# Sessions


def test_session_ids_cannot_be_guessed():
    ids = {new_session_id() for _ in range(1000)}
    assert len(ids) == 1000
    assert {len(sid) for sid in ids} == {32}, "192 bits in base64"
    assert all(sum(sid[place] == "A" for sid in ids) < 60 for place in range(32)), "no place is fixed"
    assert all(urllib.parse.quote(sid, safe="") == sid for sid in ids)


def test_the_session_in_the_path_wins_over_the_bearers():
    with served(OpenAIAdapter, lambda call: "hi") as server:
        server.adapter.open_session("b")
        assert server.post("/s/b" + CHAT, ask(user=SID), sid=SID, headers={"X-Api-Key": SID})[0] == 200
        assert server.finish() == []
        assert len(server.finish("b")) == 1


def test_a_good_bearer_does_not_open_a_bad_path():
    with served(OpenAIAdapter, []) as server:
        assert server.post("/s/other" + CHAT, ask())[0] == 401
        assert server.engine.calls == []


TRICKS = [
    "%2e%2e",
    "%2e%2e%2fsession-1",
    "session-1%2f..",
    "session-1%00",
    "%00",
    "session-1%20",
    "SESSION-1",
    "session%2D1%0d%0aX-Evil:1",
    "session-1%0a",
    "*",
    "%ff",
    "%ED%A0%80",
    "x" * 7000,
]


@pytest.mark.parametrize("name", TRICKS, ids=lambda name: name[:30])
@pytest.mark.parametrize(("kind", "path"), [(OpenAIAdapter, CHAT), (AnthropicAdapter, MESSAGES)])
def test_names_with_tricks_open_nothing(kind, path, name):
    with served(kind, []) as server:
        status, body = server.post(f"/s/{name}{path}", ask(max_tokens=5), sid=None)
        assert status == 401
        assert body["error"]["message"] == "no open session has this id"
        assert server.engine.calls == []


def test_a_name_is_taken_as_it_is_written_once_decoded():
    with served(OpenAIAdapter, ["hi"]) as server:
        assert server.post("/s/session%2D1" + CHAT, ask(), sid=None)[0] == 200


@pytest.mark.parametrize("name", ["a%0d%0aX-Evil:%201", "%00", "a%20b", "%C3%A9", "x" * 300])
def test_what_cannot_stand_in_a_header_is_no_name(name):
    with served(OpenAIAdapter, [], allow_unknown_sessions=True) as server:
        assert server.post(f"/s/{name}{CHAT}", ask(), sid=None)[0] == 401
        assert server.engine.calls == []
        with pytest.raises(ValueError, match="visible ASCII"):
            server.adapter.open_session(urllib.parse.unquote(name, errors="surrogateescape"))


def test_the_loopback_is_the_default():
    assert inspect.signature(serve_app).parameters["host"].default == "127.0.0.1"
    with served(OpenAIAdapter, []) as server:
        assert {address[0] for address in server.handle.runner.addresses} == {"127.0.0.1"}


# Turns of other sessions


@contextmanager
def two_sessions(kind, answer=THOUGHT):
    """A server whose session `b` asks after `SID` did; the engine's last prompt is b's."""
    with served(kind, lambda call: answer if call.number == 0 else "no secret") as server:
        server.adapter.open_session("b")
        yield server


def assert_kept(server, status):
    """The other session's turn is in no prompt of this one's, as text or as sampled."""
    assert status in (200, 400, 404)
    for call in server.engine.calls[1:]:
        assert SECRET not in call.prompt
    assert tokens_trained(server.finish()) == len(server.sampled[0])


def test_previous_response_id_of_another_session_is_not_found():
    with two_sessions(OpenAIAdapter) as server:
        first = server.post(RESPONSES, {"input": "hello"})[1]
        going_on = {"input": "what is the word?", "previous_response_id": first["id"]}
        status, body = server.post(RESPONSES, going_on, sid="b")
        never = server.post(RESPONSES, going_on | {"previous_response_id": "resp_never"}, sid="b")[1]
        assert status == 404
        assert body["error"]["message"].replace(first["id"], "resp_never") == never["error"]["message"]
        assert_kept(server, status)


def test_an_item_reference_to_another_session_is_not_found():
    with two_sessions(OpenAIAdapter, CALL) as server:
        first = server.post(RESPONSES, {"input": "hello"})[1]
        ask_user = {"role": "user", "content": "what is the word?"}
        for item in first["output"]:
            reference = {"type": "item_reference", "id": item["id"]}
            status, body = server.post(RESPONSES, {"input": [reference, ask_user]}, sid="b")
            assert status == 404
            assert item["id"] in body["error"]["message"]
        assert len(server.engine.calls) == 1
        assert_kept(server, status)


def test_handles_of_another_session_bring_nothing_of_its_turn():
    tools = [{"type": "function", "name": "read"}]
    with two_sessions(OpenAIAdapter, CALL) as server:
        first = server.post(RESPONSES, {"input": "hello", "tools": tools})[1]
        reasoning, message, call = first["output"]
        stolen = [
            {"type": "reasoning", "id": reasoning["id"], "summary": []}
            | {"encrypted_content": reasoning["encrypted_content"]},
            {"type": "message", "role": "assistant", "id": message["id"], "content": "nothing"},
            {"type": "function_call", "call_id": call["call_id"], "id": call["id"], "name": "read"}
            | {"arguments": "{}"},
            {"type": "function_call_output", "call_id": call["call_id"], "output": "nothing"},
        ]
        status, _ = server.post(RESPONSES, {"input": stolen, "tools": tools}, sid="b")
        assert_kept(server, status)


def test_signatures_of_another_session_bring_nothing_of_its_turn():
    tools = [{"name": "read", "input_schema": {"type": "object"}}]
    hello = {"role": "user", "content": "hello"}
    with two_sessions(AnthropicAdapter, CALL) as server:
        body = {"max_tokens": 500, "messages": [hello], "tools": tools}
        thinking, _, use = server.post(MESSAGES, body)[1]["content"]
        stolen = [thinking | {"thinking": "nothing"}, use | {"input": {}}]
        result = {"type": "tool_result", "tool_use_id": use["id"], "content": "nothing"}
        history = [hello, {"role": "assistant", "content": stolen}, {"role": "user", "content": [result]}]
        status, _ = server.post(MESSAGES, body | {"messages": history}, sid="b")
        assert_kept(server, status)


def test_a_retry_does_not_get_another_sessions_answer():
    with two_sessions(OpenAIAdapter) as server:
        server.post(CHAT, ask())
        status, body = server.post(CHAT, ask(), sid="b", headers={"X-Stainless-Retry-Count": "1"})
        assert SECRET not in json.dumps(body)
        assert_kept(server, status)


def test_failures_of_the_adapters_own_tell_no_details():
    def broken(*_):
        raise RuntimeError(f"/home/somebody/{SECRET}")

    with served(OpenAIAdapter, ["hi"], debug_callback=broken) as server:
        status, body = server.post(CHAT, ask())
        assert (status, body["error"]["type"]) == (500, "server_error")
        assert SECRET not in json.dumps(body) and "/home" not in json.dumps(body)


# Size and time


def test_a_body_that_does_not_tell_its_size_is_limited_too(monkeypatch):
    monkeypatch.setattr("slime.agent.adapters.base.BODY_BYTES", 1000)
    with served(OpenAIAdapter, []) as server:
        connection = http.client.HTTPConnection(*address_of(server), timeout=10)
        chunks = (b"x" * 500 for _ in range(8))
        connection.request("POST", CHAT, chunks, {"Authorization": f"Bearer {SID}"}, encode_chunked=True)
        assert connection.getresponse().status == 413


def test_a_small_body_that_unpacks_to_a_large_one_is_limited_too(monkeypatch):
    monkeypatch.setattr("slime.agent.adapters.base.BODY_BYTES", 100_000)
    with served(OpenAIAdapter, ["hi"]) as server:
        packed = {"Content-Encoding": "gzip"}
        assert server.raw(CHAT, gzip.compress(b" " * 50_000_000), headers=packed)[0] == 413
        assert server.raw(CHAT, gzip.compress(GOOD), headers=packed)[0] == 200


@pytest.mark.parametrize("depth", [230, 240, 250, 254, 300, 1023, 1030, 100_000])
@pytest.mark.parametrize("path", [CHAT, RESPONSES])
def test_deep_nesting_is_refused_or_served(path, depth):
    deep = '{"x":' * depth + "1" + "}" * depth
    tool = {"name": "read", "parameters": 0}
    tools = [{"type": "function", "function": tool} if path == CHAT else {"type": "function", **tool}]
    body = json.dumps(ask(tools=tools) | {"input": "hello"}).replace(
        '"parameters": 0', f'"parameters": {deep}'
    )
    with served(OpenAIAdapter, ["hi"]) as server:
        status, answer = server.post(path, body.encode())
        assert status == (200 if depth < 235 else 400)
        assert depth < 235 or any(
            word in answer["error"]["message"] for word in ("nested too deeply", "not JSON")
        )


def test_clients_that_only_wait_keep_nobody_from_being_served():
    beginnings = [b"", b"POST /v1/ch", post(headers="Content-Length: 100\r\n", body=b"{")[:-3]]
    beginnings.append(post(headers="Content-Length: 100\r\n", body=b"{"))
    with served(OpenAIAdapter, ["hi"]) as server, ExitStack() as stack:
        for number in range(200):
            connection = stack.enter_context(socket.create_connection(address_of(server), timeout=10))
            connection.sendall(beginnings[number % len(beginnings)])
        assert server.post(CHAT, ask())[0] == 200


@contextmanager
def served_narrowly(answer):
    """An adapter whose connections hold little of what their clients do not read."""
    tokenizer, listener = family_tokenizer("qwen3"), socket.create_server(("127.0.0.1", 0))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    with start_scripted_server(lambda call: answer, tokenizer) as engine:
        adapter = OpenAIAdapter(tokenizer=tokenizer, sglang_url=engine.url)
        adapter.open_session(SID)
        handle = run_app_in_thread(adapter.app, sock=listener)
        try:
            yield Served(adapter, handle, engine.engine, [])
        finally:
            handle.stop()


def test_a_client_that_reads_nothing_is_cut_off_and_its_request_aborted(monkeypatch):
    monkeypatch.setattr("slime.agent.adapters.http.WRITE_SECONDS", 0.3)
    endless = ScriptedAnswer(text="x" * 4000, token_latency=0.001)
    with served_narrowly(endless) as server, socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(address_of(server))
        body = json.dumps(ask(stream=True, max_tokens=4000)).encode()
        connection.sendall(post(headers=f"Content-Length: {len(body)}\r\n", body=body))
        wait_for(lambda: any(event.startswith("abort:") for event in server.engine.events), 20)
        wait_for(lambda: server.engine.stats.running == 0)
        wait_for(lambda: server.adapter.counters.get("broken") == 1)
        wait_for(lambda: not server.handle.runner.server.connections)
        assert tokens_trained(server.finish()) == 0
        assert server.adapter.manager.totals.unaccounted == 0


# Broken HTTP

SMUGGLED = post(headers=f"Connection: close\r\nContent-Length: {len(GOOD)}\r\n", body=GOOD)
BROKEN = {
    "length and chunks": post(
        headers="Content-Length: 4\r\nTransfer-Encoding: chunked\r\n", body=b"0\r\n\r\n"
    ),
    "two lengths": post(headers="Content-Length: 0\r\nContent-Length: 9\r\n"),
    "chunks twice": post(headers="Transfer-Encoding: chunked, identity\r\n", body=b"0\r\n\r\n"),
    "a blank before the colon": post(headers="Transfer-Encoding : chunked\r\n", body=b"0\r\n\r\n"),
    "a length that is none": post(headers="Content-Length: +0\r\n"),
    "a length below nothing": post(headers="Content-Length: -1\r\n"),
    "a size of a chunk that is none": post(headers="Transfer-Encoding: chunked\r\n", body=b"0x1\r\na\r\n"),
    "a line break within a header": post(headers="X-A: b\rX-B: c\r\n"),
    "a zero within a header": post(headers="X-A: b\0c\r\n"),
    "no version": b"POST /v1/chat/completions\r\n\r\n",
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_request_behind_one_of_unclear_length_is_not_executed(name):
    with served(OpenAIAdapter, ["hi"]) as server:
        answer = spoken(server, BROKEN[name] + SMUGGLED)
        assert b" 400 Bad Request\r\n" in answer and b" 200 OK\r\n" not in answer
        assert server.engine.calls == []
        assert b"Traceback" not in answer and b".py" not in answer
        assert server.post(CHAT, ask())[0] == 200, "the server serves on"


def test_requests_in_a_row_are_each_executed():
    with served(OpenAIAdapter, ["hi"]) as server:
        refused = post(headers="Content-Length: 2\r\n", body=b"{}")
        answer = spoken(server, refused + SMUGGLED)
        assert answer.count(b"HTTP/1.1 400 ") == 1
        assert answer.count(b"HTTP/1.1 200 ") == 1

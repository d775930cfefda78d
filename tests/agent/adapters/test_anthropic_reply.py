"""Replies are what the Anthropic SDK reads, word for word, and come back by the handles that were minted."""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import orjson
import pytest

from slime.agent.adapters.wire import AdapterError, Ending, ModelRequest, Usage
from slime.agent.messages import handles_of
from slime.agent.parsing.events import ReasoningDelta, TextDelta, ToolCallDelta, ToolCallEnd, ToolCallStart
from tests.agent.adapters.anthropic_kit import WIRE, one

USAGE = Usage(prompt_tokens=100, completion_tokens=20, cached_tokens=60, reasoning_tokens=5)
CALLS = [
    ReasoningDelta("Let me "),
    ReasoningDelta("see."),
    TextDelta("I "),
    TextDelta("look."),
    ToolCallStart(0, "Bash"),
]
CALLS += [ToolCallDelta(0, '{"x"'), ToolCallDelta(0, ": 1}"), ToolCallEnd(0, '{"x": 1}')]
CALLS += [ToolCallStart(1, "Read"), ToolCallDelta(1, "{}"), ToolCallEnd(1, "{}")]
BROKEN = [ToolCallStart(0, "Bash"), ToolCallDelta(0, '{"x": "l'), ToolCallEnd(0, '{"x": "l', ill_formed=True)]
STOP = Ending(finish_reason="stop", usage=USAGE)


def reply(events, ending=STOP):
    """The events of a stream, the body, and the writer."""
    writer = WIRE.writer(ModelRequest(messages=[], model="m"))
    data = writer.begin(Usage(prompt_tokens=100)) + b"".join(writer.event(event) for event in events)
    data += writer.keepalive() + writer.end(ending)
    return parsed(data), writer.whole(ending), writer


def parsed(data):
    events = []
    for chunk in data.decode().split("\n\n")[:-1]:
        head, _, body = chunk.partition("\n")
        event = json.loads(body.removeprefix("data: "))
        assert head == f"event: {event['type']}"
        events.append(event)
    return events


@contextmanager
def sdk(kind, status, answer):
    """The Anthropic SDK's client of a server that gives one answer."""
    anthropic = pytest.importorskip("anthropic")

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *args):
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        with anthropic.Anthropic(base_url=url, api_key="k", max_retries=0) as client:
            yield client
    finally:
        server.shutdown()
        server.server_close()


ASKED = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "x"}]}


def plain(message):
    return message.model_dump(exclude_none=True, exclude={"content": {"__all__": {"parsed_output"}}})


@pytest.mark.parametrize("events", [CALLS, CALLS[:4], CALLS[:2], []])
def test_the_sdk_reads_the_stream_as_it_reads_the_body(events):
    writer = WIRE.writer(ModelRequest(messages=[], model="m"))
    stream = writer.begin(Usage(prompt_tokens=100)) + b"".join(writer.event(event) for event in events)
    stream += writer.keepalive() + writer.end(STOP)
    with sdk("text/event-stream", 200, stream) as client, client.messages.stream(**ASKED) as reader:
        streamed = reader.get_final_message()
    with sdk("application/json", 200, orjson.dumps(writer.whole(STOP))) as client:
        whole = client.messages.create(**ASKED)
    assert plain(streamed) == plain(whole)
    assert [block.type for block in whole.content] == [
        block["type"] for block in writer.whole(STOP)["content"]
    ]


def test_the_sdk_replays_a_turn_that_is_known_by_its_handles():
    writer = WIRE.writer(ModelRequest(messages=[], model="m"))
    stream = writer.begin(Usage()) + b"".join(writer.event(event) for event in CALLS) + writer.end(STOP)
    with sdk("text/event-stream", 200, stream) as client, client.messages.stream(**ASKED) as reader:
        content = [block.model_dump(exclude_none=True) for block in reader.get_final_message().content]
    (message,) = one(content, role="assistant")
    assert list(handles_of(message)) == writer.handles


@pytest.mark.parametrize(
    "kind, raised",
    [
        ("authentication", "AuthenticationError"),
        ("invalid_request", "BadRequestError"),
        ("context_overflow", "BadRequestError"),
        ("rate_limit", "RateLimitError"),
        ("overloaded", "OverloadedError"),
        ("not_found", "NotFoundError"),
        ("closed", "PermissionDeniedError"),
    ],
)
def test_the_sdk_raises_its_own_error(kind, raised):
    status, body = WIRE.error(AdapterError(kind, "why"))
    with sdk("application/json", status, orjson.dumps(body)) as client, pytest.raises(Exception) as caught:
        client.messages.create(**ASKED)
    assert type(caught.value).__name__ == raised
    assert "why" in str(caught.value)


def test_the_sdk_raises_a_failure_in_the_midst_of_a_stream():
    anthropic = pytest.importorskip("anthropic")
    writer = WIRE.writer(ModelRequest(messages=[]))
    stream = (
        writer.begin(Usage())
        + writer.event(TextDelta("a"))
        + writer.error(AdapterError("overloaded", "full"))
    )
    with (
        sdk("text/event-stream", 200, stream) as client,
        pytest.raises(anthropic.APIStatusError, match="full"),
    ):
        list(client.messages.create(**ASKED, stream=True))


def test_blocks_come_one_after_the_other():
    streamed, _, _ = reply(CALLS)
    assert [event["type"].removeprefix("content_block_") for event in streamed] == [
        "message_start",
        *("start", "delta", "delta", "delta", "stop"),
        *("start", "delta", "delta", "stop"),
        *("start", "delta", "delta", "stop"),
        *("start", "delta", "stop"),
        *("ping", "message_delta", "message_stop"),
    ]
    numbers = [event["index"] for event in streamed if "index" in event]
    assert numbers == sorted(numbers)


def test_handles_are_minted_anew_and_come_back_by_the_clients_next_request():
    _, body, writer = reply(CALLS)
    _, _, other = reply(CALLS)
    assert len(writer.handles) == 3 and not set(writer.handles) & set(other.handles)
    assert writer.tool_ids == [block["id"] for block in body["content"] if block["type"] == "tool_use"]
    (message,) = one(body["content"], role="assistant")
    assert list(handles_of(message)) == writer.handles
    assert message["content"] == "I look." and message["reasoning_content"] == "Let me see."
    assert [call["function"]["arguments"] for call in message["tool_calls"]] == [{"x": 1}, {}]


def test_each_piece_leaves_when_it_comes():
    writer = WIRE.writer(ModelRequest(messages=[]))
    writer.begin(Usage())
    for event in CALLS:
        sent = parsed(writer.event(event))
        said = getattr(event, "text", None) or getattr(event, "json", None)
        assert said is None or any(said in str(delta.get("delta", {}).values()) for delta in sent)


def test_arguments_that_are_ill_formed_leave_as_sampled():
    streamed, body, _ = reply(BROKEN)
    pieces = [event["delta"]["partial_json"] for event in streamed if event["type"] == "content_block_delta"]
    assert "".join(pieces) == '{"x": "l'
    assert body["content"][0]["input"] == {"_raw_arguments": '{"x": "l'}
    (message,) = one(body["content"], role="assistant")
    assert message["tool_calls"][0]["function"]["arguments"] == '{"x": "l'


@pytest.mark.parametrize(
    "events, finish, stop_sequence, told",
    [
        (CALLS[:4], "stop", None, ("end_turn", None)),
        (CALLS[:4], "stop", "END", ("stop_sequence", "END")),
        (CALLS, "stop", None, ("tool_use", None)),
        (CALLS, "stop", "END", ("tool_use", None)),
        (BROKEN, "length", None, ("max_tokens", None)),
        (CALLS[:4], "abort", None, ("max_tokens", None)),
    ],
)
def test_the_stop_reason_says_how_the_turn_ended(events, finish, stop_sequence, told):
    streamed, body, _ = reply(events, Ending(finish_reason=finish, usage=USAGE, stop_sequence=stop_sequence))
    delta = next(event for event in streamed if event["type"] == "message_delta")["delta"]
    assert (delta["stop_reason"], delta["stop_sequence"]) == told
    assert (body["stop_reason"], body["stop_sequence"]) == told


def test_usage_is_true_and_counts_cached_tokens_once():
    streamed, body, _ = reply(CALLS)
    assert streamed[0]["message"]["usage"]["input_tokens"] == 100
    usage = next(event for event in streamed if event["type"] == "message_delta")["usage"]
    assert usage == body["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == 100
    assert (usage["output_tokens"], usage["output_tokens_details"]["thinking_tokens"]) == (20, 5)


def test_an_empty_answer_is_an_empty_text():
    _, body, writer = reply([])
    assert body["content"] == [{"type": "text", "text": ""}] and body["stop_reason"] == "end_turn"
    assert writer.handles == []


def test_a_failure_in_the_midst_is_an_error_event():
    writer = WIRE.writer(ModelRequest(messages=[]))
    (event,) = parsed(writer.error(AdapterError("overloaded", "no engine")))
    assert event == {"type": "error", "error": {"type": "overloaded_error", "message": "no engine"}}


@pytest.mark.parametrize(
    "kind, status, name",
    [
        ("authentication", 401, "authentication_error"),
        ("invalid_request", 400, "invalid_request_error"),
        ("rate_limit", 429, "rate_limit_error"),
        ("overloaded", 529, "overloaded_error"),
        ("upstream", 500, "api_error"),
        ("not_found", 404, "not_found_error"),
        ("too_large", 413, "request_too_large"),
        ("closed", 403, "permission_error"),
    ],
)
def test_errors_have_their_status_and_type(kind, status, name):
    told = {"type": "error", "error": {"type": name, "message": "why"}}
    assert WIRE.error(AdapterError(kind, "why")) == (status, told)


def test_an_overflow_has_the_words_by_which_claude_code_compacts():
    exact = "prompt is too long: 70000 tokens > 65536 maximum"
    status, body = WIRE.error(AdapterError("context_overflow", exact))
    assert status == 400 and body["error"] == {"type": "invalid_request_error", "message": exact}
    _, body = WIRE.error(AdapterError("context_overflow", "input exceeds the context length"))
    assert body["error"]["message"] == "prompt is too long: input exceeds the context length"

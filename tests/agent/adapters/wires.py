"""What the tests of the protocols share: outputs cut into events, bodies changed in one place, a server."""

import contextlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from hypothesis import strategies as st

from slime.agent.adapters.wire import AdapterError, Ending, Usage
from slime.agent.parsing.events import ReasoningDelta, TextDelta, ToolCallDelta, ToolCallEnd, ToolCallStart

DATA = Path(__file__).parent / "requests"
USAGE = Usage(prompt_tokens=7, completion_tokens=5, cached_tokens=3, reasoning_tokens=2)
STOP = Ending(finish_reason="stop", usage=USAGE)
LENGTH = Ending(finish_reason="length", usage=USAGE)

texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)
arguments = st.one_of(
    st.dictionaries(texts, texts, max_size=2).map(json.dumps),
    texts.map(lambda text: json.dumps({"input": text})),
    texts.map(lambda text: json.dumps({"input": text})[:-3]),
    texts,
)
outputs = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["reasoning", "text"]), texts),
        st.tuples(st.sampled_from(["run", "free", "box.open"]), arguments),
    ),
    max_size=5,
)
anything = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 2**70) | st.floats(allow_nan=False) | st.just("") | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=5,
)


def sample(name):
    """Headers and body of a client's real request, its texts replaced."""
    data = json.loads((DATA / f"{name}.json").read_text())
    return data["headers"], data["body"]


def pieces(text, size):
    return [text[start : start + size] for start in range(0, len(text), size)]


def events_of(output, size=1000):
    """The events of an output of ``(kind, text)``, where any other kind is a tool's name."""
    events, calls = [], 0
    for kind, text in output:
        if kind == "reasoning":
            events += [ReasoningDelta(piece) for piece in pieces(text, size)]
        elif kind == "text":
            events += [TextDelta(piece) for piece in pieces(text, size)]
        else:
            events += [
                ToolCallStart(calls, kind),
                *(ToolCallDelta(calls, piece) for piece in pieces(text, size)),
            ]
            events.append(ToolCallEnd(calls, text))
            calls += 1
    return events


def written(writer, events, ending=STOP):
    """All bytes of an answer."""
    return b"".join([writer.begin(USAGE), *map(writer.event, events), writer.end(ending)])


def data_of(stream):
    """The payloads of server-sent events, ``[DONE]`` left out."""
    lines = (line.removeprefix("data: ") for line in stream.decode().split("\n") if line.startswith("data: "))
    return [json.loads(line) for line in lines if line != "[DONE]"]


def places(value, path=()):
    """Paths to every part of a JSON value."""
    yield path
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, part in parts:
        yield from places(part, (*path, name))


def replaced(value, path, new):
    if not path:
        return new
    copy = value.copy()
    copy[path[0]] = replaced(value[path[0]], path[1:], new)
    return copy


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        try:
            if server.error:
                raise server.error
            request = server.wire.translate(body, dict(self.headers))
        except AdapterError as error:
            status, refusal = server.wire.error(error)
            return self._answer(status, "application/json", json.dumps(refusal).encode())
        server.requests.append(request)
        writer = server.wire.writer(request)
        stream = written(writer, server.events, server.ending)
        if request.stream:
            return self._answer(200, "text/event-stream", stream)
        return self._answer(200, "application/json", json.dumps(writer.whole(server.ending)).encode())

    def _answer(self, status, kind, body):
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        """Nothing on the terminal."""


@contextlib.contextmanager
def served(wire, output=(), *, ending=STOP, error=None):
    """A server that gives `output`, or refuses with `error`; its `requests` are in the common form."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.wire, server.events, server.ending, server.error = wire, events_of(output, 3), ending, error
    server.requests, server.url = [], f"http://127.0.0.1:{server.server_port}/v1"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()

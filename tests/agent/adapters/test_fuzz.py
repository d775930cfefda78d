"""Random bodies and random clients for a bounded time: never a bare 500, never an invariant broken.

`SLIME_FUZZ_SECONDS` is the time for all of it, `SLIME_FUZZ_SEED` repeats a run; a failure names its case.
"""

import contextlib
import http.client
import json
import os
import random
import threading
import time
import urllib.parse

import pytest

from slime.agent.adapters import AnthropicAdapter, OpenAIAdapter
from slime.serving.scripted import ScriptedAnswer
from slime.utils.types import Sample
from tests.agent.adapters.fuzz_bodies import HEADERS, PATHS, TEXTS, encoded, mutate, seeds, told, watched_logs
from tests.agent.adapters.fuzz_clients import Agent, Truth, call_of
from tests.agent.kit import events, served
from tests.agent.templates import family_tokenizer

SECONDS = float(os.environ.get("SLIME_FUZZ_SECONDS", "15"))
SEED = os.environ.get("SLIME_FUZZ_SEED") or "1"
ADAPTERS = {"chat": OpenAIAdapter, "responses": OpenAIAdapter, "messages": AnthropicAdapter}
CASES_PER_SESSION = 50
REFUSALS = {400, 401, 403, 404, 413, 429}
LAST_EVENTS = {"message_stop", "response.completed", "response.incomplete", "chat.completion.chunk"}


def cases(seconds, first=0, least=1):
    """Numbers and sources of randomness, one a case, until the time is over, and `least` in any case."""
    end, number = time.monotonic() + seconds, first
    while number < first + least or time.monotonic() < end:
        yield number, random.Random(f"{SEED}-{number}")
        number += 1


class Client:
    """A connection that is kept while it is good."""

    def __init__(self, url):
        self._address = urllib.parse.urlsplit(url)
        self._connection = None

    def ask(self, method, path, body, headers):
        """Status, content type and body; None where the server closed the connection without an answer."""
        self._connection = self._connection or http.client.HTTPConnection(
            self._address.hostname, self._address.port, timeout=20
        )
        try:
            self._send(method, path, body, headers)
            response = self._connection.getresponse()
            answer = response.status, response.headers.get_content_type(), response.read()
        except (http.client.HTTPException, ConnectionError):
            self.close()
            return None
        if response.will_close or response.status >= 400:
            self.close()
        return answer

    def _send(self, method, path, body, headers):
        self._connection.putrequest(method, path, skip_accept_encoding=True)
        for name, value in headers:
            self._connection.putheader(name, value.encode("latin-1"))
        self._connection.putheader("Content-Length", str(len(body)))
        self._connection.endheaders(body)

    def close(self):
        if self._connection is not None:
            self._connection.close()
        self._connection = None


def answers(call):
    """Calls of a tool in the formats of two families, reasoning, stray markers, bytes that are no text."""
    source = random.Random(call.number)
    name = source.choice(["read", "shell", "Bash", "str_replace", "apply_patch", "edit", "no.such tool", ""])
    arguments = source.choice(
        ['{"input": "a", "x": 1}', '{"command": ["l', "[1]", "{}", '{"path": {"a": []}}']
    )
    texts = [
        "plain words",
        f'<think>\nwhy\n</think>\n<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>',
        f"a<tool_call>\n<function={name}>\n<parameter=x>\n{arguments}\n</parameter>\n</function>\n</tool_call>",
        f'<tool_call>{arguments}</tool_call><tool_call>\n{{"name": "{name}"',
        "</think><think><tool_call></tool_response>",
        "",
    ]
    if source.random() < 0.1:
        return ScriptedAnswer(token_ids=[source.randrange(256) for _ in range(9)])
    return ScriptedAnswer(text=source.choice(texts))


def is_refusal(protocol, body):
    """Whether a body is an error in the protocol's shape."""
    said = body.get("error") if isinstance(body, dict) else None
    if not isinstance(said, dict) or not isinstance(said.get("message"), str) or not said["message"]:
        return False
    if protocol == "messages":
        return body.get("type") == "error" and said.keys() == {"type", "message"}
    return said.keys() == {"message", "type", "param", "code"}


def is_answer(protocol, kind, raw):
    """Whether a body is a whole answer in the protocol's shape."""
    if kind == "text/event-stream":
        name, last = events(raw)[-1]
        return last.get("type", last.get("object", name)) in LAST_EVENTS
    body = json.loads(raw)
    shapes = {"chat": ("object", "chat.completion"), "responses": ("object", "response")}
    key, value = shapes.get(protocol, ("type", "message"))
    return body.get(key) == value or body.keys() == {"input_tokens"}


def verdict(protocol, answer):
    """What is wrong with an answer, or nothing."""
    if answer is None:
        return "no answer"
    status, kind, raw = answer
    with contextlib.suppress(ValueError, IndexError, AttributeError):
        if status == 200 and is_answer(protocol, kind, raw):
            return ""
        if status in REFUSALS and is_refusal(protocol, json.loads(raw)):
            return ""
    return f"{status} {raw[:500]!r}"


@contextlib.contextmanager
def fuzzed(protocol, **options):
    """A served adapter whose logs must stay free of tracebacks."""
    with watched_logs() as records, served(ADAPTERS[protocol], answers, sid=None, **options) as server:
        yield server, records
        assert not records, f"seed {SEED}: {told(records)}"
        assert "error_upstream" not in server.adapter.counters


def finish(server, sid):
    """The samples of a session, of whose tokens none is missing."""
    samples = server.finish(sid, base_sample=Sample(index=0))
    assert server.adapter.manager.totals.unaccounted == 0
    return samples


@pytest.mark.parametrize(
    "options",
    [{}, {"tool_parser": "qwen3_coder"}, {"family": "qwen_vl", "engine": {"takes_images": True}}],
    ids=["text", "qwen3_coder", "images"],
)
@pytest.mark.parametrize("protocol", list(PATHS))
def test_any_body_gets_an_answer_or_a_refusal_in_the_protocols_shape(protocol, options):
    valid, statuses = seeds()[protocol], {}
    with fuzzed(protocol, **options) as (server, records):
        client = Client(server.url)
        for number, source in cases(SECONDS / 15, least=20):
            sid = f"s{number // CASES_PER_SESSION}"
            if number % CASES_PER_SESSION == 0:
                server.adapter.open_session(sid, sampling_defaults={"max_new_tokens": 200})
            body = source.choice(valid)
            for _ in range(source.choice([0, 1, 1, 1, 2, 3, 8])):
                body = mutate(source, body)
            path = PATHS[protocol] + (
                "/count_tokens" if protocol == "messages" and source.random() < 0.1 else ""
            )
            headers = [("Authorization", f"Bearer {sid}"), *some_headers(source, source.choice([0, 0, 1, 3]))]
            answer = client.ask("POST", path, encoded(source, body), headers)
            wrong = verdict(protocol, answer) or told(records)
            assert not wrong, f"seed {SEED}, case {number}: {path} {headers} {str(body)[:3000]}: {wrong}"
            statuses[answer[0]] = statuses.get(answer[0], 0) + 1
            if number % CASES_PER_SESSION == CASES_PER_SESSION - 1:
                finish(server, sid)
    assert statuses.get(200), f"seed {SEED}: no body was good: {statuses}"


def some_headers(source, count):
    """Random headers, none of them twice."""
    return list(dict(source.sample(HEADERS, count)).items())


def random_path(source):
    known = [*PATHS.values(), "/v1/messages/count_tokens", "/v1/models", "/healthz", "/v1", "/api/hello", "/"]
    parts = ["/s", "/s/a", "/s/%00", "/s/%2e%2e", "/..", "//", "/%ff", "/s/a%0d%0aX:1", "?a=%00&b", "%", "/é"]
    path = source.choice(known)
    for _ in range(source.randrange(3)):
        extra = source.choice([*parts, "/" + source.choice(TEXTS)[:200], "/" + "x" * 3000])
        path = extra + path if source.random() < 0.6 else path + extra
    quoted = urllib.parse.quote(path.encode(errors="surrogatepass"), safe="/%?&=.:")[:8000]
    return quoted if quoted.startswith("/") else "/" + quoted


@pytest.mark.parametrize("protocol", ["chat", "messages"])
def test_any_path_and_method_gets_an_answer_or_a_refusal(protocol):
    methods = ["GET", "POST", "PUT", "DELETE", "OPTIONS", "PATCH", "HEAD", "TRACE", "PROPFIND"]
    with fuzzed(protocol) as (server, records):
        client = Client(server.url)
        for number, source in cases(SECONDS / 15):
            method, path = source.choice(methods), random_path(source)
            headers = some_headers(source, source.choice([0, 1, 3]))
            # A body that nobody reads and that cannot be decoded ends the connection behind the answer.
            headers = [header for header in headers if header[0] != "Content-Encoding"]
            answer = client.ask(method, path, b"{}", headers)
            wrong = told(records)
            if answer is None or answer[0] not in REFUSALS | {200}:
                wrong = wrong or str(answer)
            elif method != "HEAD" and answer[0] != 200:
                wrong = wrong or verdict(protocol, answer)
            assert not wrong, f"seed {SEED}, case {number}: {method} {path} {headers}: {wrong}"


def live(agents, turns):
    """The conversations of a session, side by side."""
    threads = [threading.Thread(target=agent.run, args=(turns,), daemon=True) for agent in agents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def agents_of(server, protocol, sid, source):
    """A main conversation, and now and then sub-agents."""
    names = ["", *(f"helper{number}" for number in range(source.choice([0, 0, 1, 2])))]
    server.adapter.open_session(sid)
    return [
        Agent(server.url, protocol, sid, random.Random(f"{source.random()}"), agent=name) for name in names
    ]


def disturb(engine, source, is_over):
    """Abort what the engine runs, and give it other weights, now and then."""
    while not is_over.wait(source.uniform(0.05, 0.4)):
        if source.random() < 0.5:
            engine.abort_all()
        else:
            engine.set_weight_version(str(source.randrange(100)))


def check_session(server, truth, agents, *, is_exact):
    """Finish a session, maybe in the midst of a request: its own tokens, once, all that a client took."""
    main, sid = agents[0], agents[0].sid
    session, tree = server.adapter.store[sid], server.adapter.manager._trees.get(sid)
    late = threading.Thread(target=main.try_to_go_on, daemon=True)
    if main.source.random() < 0.4:
        late.start()
        late.join(0.01)
    samples = server.finish(sid, base_sample=Sample(index=0), wait_timeout=0.02)
    if late.ident is not None:
        late.join()
    assert not session.inflight
    assert not session.asked
    counts, owners = truth.trained(samples), truth.check_prompts()
    assert {owners.get(number, sid) for number in counts} <= {sid}
    tally = samples[0].metadata["trajectory"] if samples else {}
    assert sum(counts.values()) == tally.get("tokens_trained", 0)
    taken = set().union(*(agent.delivered for agent in agents)) - passed_over(tree)
    for number in taken if is_exact else ():
        assert counts.get(number, 0) == len(truth.calls[number][1]), (
            f"call {number} was taken, but not trained"
        )


def passed_over(tree):
    """The calls whose prompt was asked again, and whose answer nothing follows."""
    turns = [node for node in tree.turns if not node.children and len(node.turn.log_probs)] if tree else []
    return {
        call_of(node.turn.log_probs[0])[0]
        for node in turns
        if any(other.turn and other.turn.number > node.turn.number for other in node.parent.children)
    }


@pytest.mark.parametrize("fork_threshold_tokens", [None, 64])
@pytest.mark.parametrize("protocol", list(PATHS))
def test_whatever_clients_do_each_sampled_token_trains_once_or_is_counted(protocol, fork_threshold_tokens):
    family = random.Random(f"{SEED}-{protocol}-{fork_threshold_tokens}").choice(["qwen3", "chatml", "llama3"])
    truth, is_over = Truth(SEED, family_tokenizer(family)), threading.Event()
    options = {"family": family, "fork_threshold_tokens": fork_threshold_tokens}
    with watched_logs() as records, served(ADAPTERS[protocol], truth.answer, sid=None, **options) as server:
        disturber = threading.Thread(target=disturb, args=(server.engine, random.Random(SEED), is_over))
        disturber.start()
        try:
            for number, source in cases(SECONDS / 15):
                sessions = [
                    agents_of(server, protocol, f"s{4 * number + index}", source) for index in range(4)
                ]
                everyone = [agent for agents in sessions for agent in agents]
                live(everyone, source.randrange(3, 12))
                failures = "\n".join(agent.failure for agent in everyone)
                assert not failures.strip(), f"seed {SEED}: {failures}"
                for agents in sessions:
                    check_session(server, truth, agents, is_exact=fork_threshold_tokens is None)
        finally:
            is_over.set()
            disturber.join()
        assert not server.adapter.store
        assert not server.adapter.manager._trees
        assert server.adapter.manager.totals.unaccounted == 0
        assert server.adapter._free == 1024
        assert not records, f"seed {SEED}: {told(records)}"
    assert truth.calls

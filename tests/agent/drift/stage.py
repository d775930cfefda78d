"""The stage of a trace: an adapter on a port before an engine, and a record of what the engine really did."""

import asyncio
import http.client
import json
import socket
import threading
import time
import urllib.parse
from contextlib import contextmanager
from dataclasses import dataclass, field

from slime.agent.adapters import AnthropicAdapter, OpenAIAdapter
from slime.agent.aiohttp_threaded import run_app_in_thread
from slime.serving.scripted import ScriptedAnswer, start_scripted_server
from slime.utils.types import Sample
from tests.agent.parsing.families import FAMILIES
from tests.agent.templates import family_tokenizer
from tests.agent.tokenizers import real_tokenizer

SID = "drift"


@dataclass(frozen=True)
class Style:
    """A model family: its tokenizer, how it writes calls and thinking, and the parsers of both."""

    tokenizer: object
    calls: str
    thinks: bool = True
    parsers: dict = field(default_factory=dict)

    def write(self, said, prompt):
        """What the policy samples as text, after a prompt that may have opened the thinking."""
        text = said.text + self._calls(said.calls) + said.tail
        opened = prompt.rstrip().endswith("<think>")
        if not self.thinks or (said.think is None and not opened):
            return text
        return ("" if opened else "<think>\n") + (said.think or "") + "\n</think>\n\n" + text

    def _calls(self, calls):
        """Arguments that are text stand as they are."""
        raw = {f"@{index}": given for index, (_, given) in enumerate(calls) if isinstance(given, str)}
        named = [
            (name, f"@{index}" if isinstance(given, str) else given)
            for index, (name, given) in enumerate(calls)
        ]
        text = FAMILIES[self.calls].render(named, json.dumps) if calls else ""
        for mark, given in raw.items():
            text = text.replace(json.dumps(mark), given)
        return text


def tiny(family):
    """A compact template on the tiny byte-level tokenizer."""
    return Style(family_tokenizer(family), "qwen", thinks=family == "qwen3")


def real(name):
    """A real tokenizer; Llama's and SmolLM2's templates name no format of calls."""
    given = {
        "llama3_1": ("llama3", False, {"tool_parser": "llama3"}),
        "smollm2": ("qwen", True, {"tool_parser": "qwen", "reasoning_parser": "qwen3"}),
        "deepseek": ("deepseekv3", True, {}),
        "qwen3": ("qwen", True, {}),
    }[name]
    return Style(real_tokenizer(name), *given)


@dataclass
class Record:
    """An engine call: what it was given, what it sampled, for which turn of the trace after which history."""

    turn: object
    history: list
    input_ids: list
    images: list
    output_ids: list = field(default_factory=list)
    log_probs: list = field(default_factory=list)
    versions: list = field(default_factory=list)

    @property
    def tokens(self):
        return [*self.input_ids, *self.output_ids]


class Stage:
    """What a trace is played on.

    Attributes:
        engine: the scripted or the embedded one.
        records: engine calls, in their order.
    """

    def __init__(self, engine, style):
        self.engine = engine
        self.style = style
        self.records = []
        self._expected = []
        self._by_rid = {}
        self._lock = threading.Lock()
        self._submit, engine.submit = engine.submit, self._recorded

    def expect(self, turn, history, marker=""):
        """The next request with `marker` in its prompt is this turn's."""
        with self._lock:
            self._expected.append((marker, turn, list(history)))

    def assert_all_came(self):
        assert not self._expected, f"the engine was not asked for {self._expected}"

    def policy(self, call):
        """The scripted engine's answer."""
        turn = self._by_rid[call.rid].turn
        said = turn.says
        if turn.how == "reweighted":
            self.engine.is_paused = True
        text = self.style.write(said, call.prompt)
        if not said.is_split:
            return ScriptedAnswer(text=text, **said.pace)
        encode = self.style.tokenizer.encode
        ids = [token for character in text for token in encode(character, add_special_tokens=False)]
        assert ids != encode(text, add_special_tokens=False)
        return ScriptedAnswer(token_ids=[*ids, self.style.tokenizer.eos_token_id], **said.pace)

    def _recorded(self, request, listener):
        prompt = self.style.tokenizer.decode(request.input_ids)
        with self._lock:
            found = [index for index, (marker, *_) in enumerate(self._expected) if marker in prompt]
            assert found, f"no turn is due for {prompt!r}"
            best = max(found, key=lambda index: (len(self._expected[index][0]), -index))
            due = self._expected.pop(best)[1:]
            record = Record(*due, list(request.input_ids), list(request.image_data))
        self._by_rid[request.rid] = record
        self.records.append(record)

        def listen(update):
            record.output_ids, record.log_probs = update.output_ids, update.output_logprobs
            record.versions = [
                span["version"] for span in update.weight_versions for _ in range(span["end"] - span["start"])
            ]
            listener(update)

        self._submit(request, listen)


class Served:
    """The adapter on its port."""

    def __init__(self, adapter, url):
        self.adapter = adapter
        self._address = urllib.parse.urlsplit(url)

    def start(self, path, body, headers):
        """A request under way, as its connection."""
        connection = http.client.HTTPConnection(self._address.hostname, self._address.port, timeout=30)
        sent = {"Authorization": f"Bearer {SID}", "Content-Type": "application/json", **headers}
        connection.request("POST", path, json.dumps(body), sent)
        return connection

    def finish(self, **options):
        """The session's samples."""
        return asyncio.run(
            self.adapter.finish_session(SID, base_sample=Sample(index=0), reward=1.0, **options)
        )


def read(connection):
    """Status and bytes of an answer; what came of one that breaks off."""
    response = connection.getresponse()
    try:
        raw = response.read()
    except http.client.IncompleteRead as error:
        raw = error.partial
    connection.close()
    return response.status, raw


def leave(connection):
    """Hang up in the midst of an answer."""
    connection.sock.shutdown(socket.SHUT_RDWR)
    connection.close()


def wait_for(condition, seconds=20.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "did not happen in time"
        time.sleep(0.005)


@contextmanager
def served(kind, url, style, *, session=None, **options):
    """An adapter before the engine at `url`."""
    options = {"tokenizer": style.tokenizer, "sglang_url": url} | style.parsers | options
    adapter = (AnthropicAdapter if kind == "anthropic" else OpenAIAdapter)(**options)
    adapter.open_session(SID, **(session or {}))
    handle = run_app_in_thread(adapter.app)
    try:
        yield Served(adapter, handle.url)
    finally:
        handle.stop()


@contextmanager
def scripted(style):
    """A stage with the scripted engine, and its URL."""
    later = []
    with start_scripted_server(
        lambda call: later[0].policy(call), style.tokenizer, takes_images=True
    ) as server:
        stage = Stage(server.engine, style)
        later.append(stage)
        yield stage, server.url

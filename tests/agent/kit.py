"""An adapter on a port, before a scripted engine; and clients' requests to it."""

import asyncio
import json
import urllib.error
import urllib.request
from contextlib import contextmanager

from slime.agent.aiohttp_threaded import run_app_in_thread
from slime.serving.script import script_of
from slime.serving.scripted import ScriptedAnswer, start_scripted_server
from slime.utils.types import Sample
from tests.agent.templates import family_tokenizer

SID = "session-1"
TOOL = {
    "type": "function",
    "function": {
        "name": "read",
        "description": "Read a file.",
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
    },
}


class Served:
    """A running adapter.

    Attributes:
        engine: the scripted engine, for its `calls` and `events`.
        sampled: the tokens of each of its answers, in the order of the calls.
    """

    def __init__(self, adapter, handle, engine, sampled):
        self.adapter, self.handle, self.engine, self.sampled = adapter, handle, engine, sampled
        self.url = handle.url

    def finish(self, sid=SID, **options):
        """The samples of a session, as a rollout on another loop takes them."""
        options = {"base_sample": Sample(index=0), "reward": 1.0} | options
        return asyncio.run(self.adapter.finish_session(sid, **options))

    def post(self, path, body, *, sid=SID, headers=None):
        """Status and parsed body of an answer that is not streamed."""
        status, raw, _ = self.raw(path, body, sid=sid, headers=headers)
        return status, json.loads(raw)

    def raw(self, path, body, *, sid=SID, headers=None, method="POST"):
        """Status, bytes and headers of an answer."""
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"} | (headers or {})
        if sid is not None:
            headers.setdefault("Authorization", f"Bearer {sid}")
        request = urllib.request.Request(self.url + path, data, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=30) as response:
                return response.status, response.read(), dict(response.headers)
        except urllib.error.HTTPError as error:
            return error.code, error.read(), dict(error.headers)


@contextmanager
def served(kind, answers, *, family="qwen3", sid=SID, session=None, engine=None, wrap=lambda t: t, **options):
    """An adapter of class `kind` before an engine that gives `answers`: a function of the call, or a list.

    `wrap` makes of the engine's tokenizer the adapter's; `engine` are options of the engine.
    """
    tokenizer = family_tokenizer(family)
    script = list(answers) if not callable(answers) else None
    sampled = []

    def policy(call):
        answer = script[call.number] if script is not None else answers(call)
        answer = ScriptedAnswer(text=answer) if isinstance(answer, str) else answer
        sampled.append(list(script_of(answer, call.params, tokenizer).token_ids))
        return answer

    with start_scripted_server(policy, tokenizer, **(engine or {})) as started:
        adapter = kind(tokenizer=wrap(tokenizer), sglang_url=started.url, **options)
        if sid is not None:
            adapter.open_session(sid, **(session or {}))
        handle = run_app_in_thread(adapter.app)
        try:
            yield Served(adapter, handle, started.engine, sampled)
        finally:
            handle.stop()


def read_until(response, part, times=1):
    """What comes of an answer until `part` has come so often."""
    raw = b""
    while raw.count(part) < times:
        more = response.read1()
        assert more, f"the answer ended: {raw!r}"
        raw += more
    return raw


def events(raw):
    """The events of a stream, as (name, data); comments and the end mark are left out."""
    found = []
    for block in raw.decode().split("\n\n"):
        lines = dict(line.split(": ", 1) for line in block.split("\n") if ": " in line)
        if "data" in lines and lines["data"] != "[DONE]":
            found.append((lines.get("event"), json.loads(lines["data"])))
    return found

"""Plays a trace: one client a conversation, its requests, and what comes of its history."""

import contextlib
import http.client
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from tests.agent.drift.clients import CLIENTS
from tests.agent.drift.script import (
    Answer,
    Note,
    Result,
    Switch,
    nothing,
)
from tests.agent.drift.stage import leave, read, wait_for
from tests.agent.kit import read_until

RETRY = {"X-Stainless-Retry-Count": "1"}


class Conversation:
    """A client with its history."""

    def __init__(self, stage, served, trace, protocol, agent=None):
        self.stage, self.served, self.trace, self.protocol = stage, served, trace, protocol
        self.client = CLIENTS[protocol]
        self.history = []
        self.marker = f"[{agent.name}]" if agent else ""
        self.system = f"{self.marker} {agent.system}" if agent else trace.system
        self.tools = trace.tools if agent is None or agent.tools is None else agent.tools
        self.headers = {**trace.headers, **(agent.headers if agent else {})}
        self.requests = 0
        self.last = None

    def play(self, steps):
        for step in steps:
            getattr(self, f"_{type(step).__name__.lower()}")(step)

    def _turn(self, turn):
        self.last = turn, list(self.history)
        answer = getattr(self, f"_{turn.how}")(turn)
        if answer is not None:
            self._hold(turn.keep(replace(answer, source=turn)))

    def _hold(self, kept):
        self.history += [kept] if isinstance(kept, Answer) else kept

    def _stream(self, turn):
        self._expect(turn)
        status, raw = read(self._ask(turn))
        assert status == turn.status, raw
        return self.client.streamed(raw) if status == 200 else None

    def _whole(self, turn):
        self._expect(turn)
        status, raw = read(self._ask(turn, stream=False))
        assert status == turn.status, raw
        return self.client.plain(json.loads(raw)) if status == 200 else None

    def _cut(self, turn):
        """The client gets some tokens and leaves: it keeps an answer of what it got, or nothing."""
        connection, _, raw = self._begun(turn)
        leave(connection)
        wait_for(lambda: self.stage.engine.stats.running == 0)
        return None if turn.keep is nothing else self.client.heard(raw[: raw.rindex(b"\n\n") + 2])

    def _died(self, turn):
        """The engine dies when the client has some tokens, of which it keeps none."""
        connection, response, _ = self._begun(turn)
        self.stage.engine.on_death()
        with contextlib.suppress(http.client.IncompleteRead):
            response.read()
        connection.close()
        wait_for(lambda: self.stage.engine.stats.running == 0)

    def _begun(self, turn):
        """A request whose first tokens have come: its connection, its response and these bytes."""
        self._expect(turn)
        connection = self._ask(turn)
        response = connection.getresponse()
        return connection, response, read_until(response, b"delta", 20)

    def _twice(self, turn):
        self._expect(turn)
        calls = len(self.stage.records)
        first = self._ask(turn)
        wait_for(lambda: len(self.stage.records) > calls)
        status, raw = read(self._ask(turn, headers=RETRY))
        assert status == 200 and read(first)[0] == 200, raw
        return self.client.streamed(raw)

    def _aborted(self, turn):
        self._expect(turn)
        calls = len(self.stage.records)
        connection = self._ask(turn)
        wait_for(lambda: len(self.stage.records) > calls and len(self.stage.records[-1].output_ids) > 4)
        self.stage.engine.abort_all()
        status, raw = read(connection)
        assert status == 200
        return self.client.streamed(raw)

    def _reweighted(self, turn):
        """The engine pauses behind the first token (`Stage.policy`), until it has the other weights."""
        self._expect(turn)
        calls = len(self.stage.records)
        connection = self._ask(turn)
        wait_for(lambda: len(self.stage.records) > calls and self.stage.records[-1].output_ids)
        self.stage.engine.set_weight_version("in the midst")
        self.stage.engine.resume()
        status, raw = read(connection)
        assert status == 200 and len(set(self.stage.records[-1].versions)) == 2
        return self.client.streamed(raw)

    def _count(self, step):
        """What Claude Code asks between turns, of a prompt that it may never send."""
        body = self.client.body(self.system, self.tools, [*self.history, Note("user", step.text)], {})
        status, raw = read(self.served.start(f"{self.client.path}/count_tokens", body, self.headers))
        assert status == 200 and json.loads(raw)["input_tokens"] > 0

    def _expect(self, turn):
        if turn.says is not None:
            self.stage.expect(turn, self.history, self.marker)

    def _ask(self, turn, *, stream=True, headers=None):
        body = self.client.body(self.system, self.tools, self.history, turn.fields)
        body["stream"] = stream
        if self.trace.dress:
            self.trace.dress(body, self.requests)
        self.requests += 1
        return self.served.start(self.client.path, body, {**self.headers, **turn.headers, **(headers or {})})

    def _again(self, step):
        turn, self.history = self.last
        calls = len(self.stage.records)
        status, raw = read(self._ask(turn, headers=RETRY))
        assert status == 200 and len(self.stage.records) == calls, raw
        self._hold(step.keep(replace(self.client.streamed(raw), source=turn)))

    def _aside(self, step):
        own = self.history, self.system, self.tools
        self.history = step.asks(self.history)
        self._switch(Switch(step.system, step.tools))
        length = len(self.history)
        self._turn(step.turn)
        answers = self.history[length:]
        self.history, self.system, self.tools = own
        self.history = step.after(self.history, *answers)

    def _results(self, step):
        """Results of the newest calls; a model that called nothing is told the same as a user's words."""
        calls = next(item for item in reversed(self.history) if isinstance(item, Answer)).calls
        if not calls:
            self.history += [
                Note("user", text, step.images_of(position)) for position, text in enumerate(step.texts)
            ]
            return
        order = step.order or range(len(step.texts))
        self.history += [
            Result(calls[position].id, step.texts[position], step.images_of(position)) for position in order
        ]

    def _change(self, step):
        self.history = step.change(self.history)

    def _switch(self, step):
        self.system = self.system if step.system is None else step.system
        self.tools = self.tools if step.tools is None else step.tools
        self.headers = self.headers if step.headers is None else {**self.trace.headers, **step.headers}

    def _version(self, step):
        self.stage.engine.set_weight_version(step.name)

    def _agent(self, agent):
        Conversation(self.stage, self.served, self.trace, self.protocol, agent).play(agent.steps)

    def _together(self, step):
        with ThreadPoolExecutor(len(step.agents)) as pool:
            plays = [
                pool.submit(self._agent if agent.name else lambda main: self.play(main.steps), agent)
                for agent in step.agents
            ]
        for play in plays:
            play.result()

"""Agents that do to their histories whatever a client may do, and the record of what the engine sampled.

User and tool messages of a session hold its mark, and most answers the number of their call; each
sampled token has a log-prob of its own. So a prompt tells whose it is, and a trained token where it is from.
"""

import contextlib
import http.client
import json
import re
import threading
import traceback
import urllib.parse
import zlib
from dataclasses import dataclass, field
from random import Random

from slime.serving.script import script_of
from slime.serving.scripted import ScriptedAnswer
from tests.agent.adapters.fuzz_bodies import PATHS, mutate
from tests.agent.kit import events

CALL_TOKENS = 4096
SCALE = 2.0**-24
MARK = re.compile(r"@(s\d+)@")
NUMBER = re.compile(r"#(\d+)#")
TOOL = {"type": "object", "properties": {"path": {"type": "string"}}}
TOOLS = {
    "chat": [{"type": "function", "function": {"name": "read", "parameters": TOOL}}],
    "responses": [{"type": "function", "name": "read", "parameters": TOOL}],
    "messages": [{"name": "read", "input_schema": TOOL}],
}
GOOD_ENDINGS = {"stop", "tool_calls", "end_turn", "tool_use", "completed"}
TEXT_KEYS = ("content", "text", "thinking", "reasoning_content", "arguments")
HANDLE_KEYS = ("id", "signature", "encrypted_content", "reasoning_content", "summary")


def call_of(log_prob):
    """The call of which a token is, and its index there."""
    return divmod(round(-log_prob / SCALE) - 1, CALL_TOKENS)


@dataclass
class Truth:
    """What the engine was asked and sampled, by call."""

    seed: str
    tokenizer: object = None
    calls: dict = field(default_factory=dict)

    def answer(self, call):
        """The policy: decided by the prompt, but for the call's number and some failures."""
        source = Random(f"{self.seed}-{zlib.crc32(call.prompt.encode(errors='replace'))}")
        if Random(f"{self.seed}-{call.number}").random() < 0.05:
            return ScriptedAnswer(
                error=source.choice([(500, "broken"), (400, "refused"), (400, "is too long")])
            )
        answer = self._answer(source, call.number)
        ids = script_of(answer, call.params, self.tokenizer).token_ids
        log_probs = [-(call.number * CALL_TOKENS + place + 1) * SCALE for place in range(len(ids))]
        self.calls[call.number] = (call, list(ids))
        return ScriptedAnswer(
            token_ids=ids, logprobs=log_probs, delay=answer.delay, token_latency=answer.token_latency
        )

    def _answer(self, source, number):
        name = f"#{number}#" if source.random() < 0.8 else source.choice(["same", "other"])
        calls = "".join(
            f'<tool_call>\n{{"name": "read", "arguments": {{"path": "{name}", "n": {n}}}}}\n</tool_call>\n'
            for n in range(source.choice([0, 0, 1, 1, 2]))
        )
        thought = f"<think>\nabout {name}\n</think>\n\n" if source.random() < 0.5 else ""
        text = thought + source.choice([f"text {name} ", "", f" {name}\n\n"]) + calls
        slow = source.random() < 0.15
        return ScriptedAnswer(
            text=text,
            delay=0.05 if source.random() < 0.05 else 0.0,
            token_latency=0.004 if slow else 0.0,
            ends=source.random() < 0.95,
        )

    def check_prompts(self):
        """The session of each call; no prompt holds anything of another than its own."""
        owners = {}
        for number, (call, _) in self.calls.items():
            marks = set(MARK.findall(call.prompt))
            assert len(marks) < 2, f"call {number} holds messages of {marks}"
            if marks:
                owners[number] = marks.pop()
        for number, owner in owners.items():
            for other in map(int, NUMBER.findall(self.calls[number][0].prompt)):
                assert owners.get(other, owner) == owner, f"call {number} holds {other}"
        return owners

    def trained(self, samples):
        """How many tokens of each call the samples train; each of them is checked."""
        counts, seen = {}, set()
        for sample in samples:
            start = len(sample.tokens) - sample.response_length
            assert start > 0
            assert len(sample.loss_mask) == len(sample.rollout_log_probs) == sample.response_length
            for place, is_on in enumerate(sample.loss_mask, start=start):
                log_prob = sample.rollout_log_probs[place - start]
                assert is_on in (0, 1)
                assert is_on or log_prob == 0.0
                if is_on:
                    number, index = call_of(log_prob)
                    call, ids = self.calls[number]
                    assert sample.tokens[place] == ids[index]
                    assert (number, index) not in seen, f"token {index} of call {number} is trained twice"
                    seen.add((number, index))
                    counts[number] = counts.get(number, 0) + 1
                    if number not in counts or index == 0:
                        assert sample.tokens[:place] == list(call.input_ids), f"the prompt of {number}"
                    else:
                        assert (number, index - 1) in seen
            spans = sample.metadata["weight_version_spans"]
            assert sum(end - begin for _, begin, end in spans) == sum(sample.loss_mask)
        return counts


@dataclass
class Reply:
    """What a client got: the answer in the form in which it goes back, or nothing."""

    status: int = 0
    said: list = field(default_factory=list)
    calls: list = field(default_factory=list)
    ending: str = ""
    name: str = ""
    numbers: set = field(default_factory=set)


class Agent:
    """One conversation of a session."""

    def __init__(self, url, protocol, sid, source, *, agent=""):
        self.url, self.protocol, self.sid, self.source, self.agent = url, protocol, sid, source, agent
        self.steps = [self._user("begin " + agent)]
        self.delivered = set()
        self.names = []
        self.last = Reply()
        self.failure = ""

    def run(self, turns):
        """Some turns, each after something that clients do."""
        try:
            self._run(turns)
        except Exception:  # noqa: BLE001 - it is raised again by the test, from its own thread
            self.failure = traceback.format_exc()

    def try_to_go_on(self):
        """A request that the server may cut off."""
        with contextlib.suppress(http.client.HTTPException, ConnectionError):
            self.go_on()

    def _run(self, turns):
        doings = [self.go_on] * 6 + [self.mangle, self.mutilate, self.drop, self.ask_again, self.compact]
        doings += [self.leave, self.leave, self.ask_twice, self.count, self.follow, self.interject]
        for _ in range(turns):
            self.source.choice(doings)()
            assert self.last.status in (0, 200, 400, 404, 500), self.last

    # What a client does

    def go_on(self):
        self._take(self.ask(self._body(self.steps)))

    def interject(self):
        self.steps.append(self._user("besides"))
        self.go_on()

    def mangle(self):
        """Change a part of what was said, as clients do."""
        place = self.source.randrange(len(self.steps))
        step = json.loads(json.dumps(self.steps[place]))
        nodes = [node for node in _objects(step) if node.keys() & {*TEXT_KEYS, *HANDLE_KEYS}]
        if nodes:
            _change(self.source, self.source.choice(nodes))
        self.steps[place] = step
        self.go_on()

    def mutilate(self):
        """Change anything; what the server refuses is undone."""
        steps = self.steps
        self.steps = [mutate(self.source, step) for step in steps] if self.source.random() < 0.3 else steps[:]
        place = self.source.randrange(len(steps))
        self.steps[place] = mutate(self.source, steps[place])
        if not all(isinstance(step, list) for step in self.steps) or not MARK.search(str(self.steps[-1])):
            self.steps = steps
            return
        self.go_on()
        if self.last.status != 200:
            self.steps = steps

    def drop(self):
        if len(self.steps) > 3:
            del self.steps[self.source.randrange(len(self.steps) - 1)]
        self.go_on()

    def ask_again(self):
        headers = {"X-Stainless-Retry-Count": "1"} if self.source.random() < 0.6 else {}
        body = self._body(self.steps)
        self.ask(body)
        self._take(self.ask(body, headers))

    def ask_twice(self):
        """The same at once, as a client does that has lost patience."""
        body, replies = self._body(self.steps), []
        headers = [{}, {"X-Stainless-Retry-Count": "1"}]
        threads = [
            threading.Thread(target=lambda h=h: replies.append(self.ask(body, h)), daemon=True)
            for h in headers
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self._take(self.source.choice(replies))

    def compact(self):
        kept = self.steps[-2:] if self.source.random() < 0.5 and len(self.steps) > 3 else []
        self.steps = [self._user("summary of what was"), *kept]
        if not MARK.search(str(self.steps[-1])):
            self.steps.append(self._user("go on"))
        self.go_on()

    def leave(self):
        """Go in the midst of an answer; then ask again, or go on from the part that came."""
        body = self._body(self.steps) | {"stream": True}
        response, connection = self._send(body, {})
        part = response.read1(self.source.choice([1, 200, 1000, 5000])) if self.source.random() < 0.7 else b""
        connection.close()
        text = self._text_of(part)
        if text and self.source.random() < 0.5:
            self.steps += [self._said(text), self._user("you were cut off")]
        self.go_on()

    def count(self):
        if self.protocol == "messages":
            body = self._body(self.steps[: self.source.randrange(len(self.steps)) + 1])
            self.ask(body, path="/v1/messages/count_tokens")
        self.go_on()

    def follow(self):
        """Go on from an earlier response by its name."""
        if self.protocol == "responses" and self.names:
            body = self._body([self._user("from there")])
            self.ask(body | {"previous_response_id": self.source.choice(self.names)})
        self.go_on()

    # On the wire

    def ask(self, body, headers=None, path=None):
        """The reply to a request that is read to its end."""
        streams = "count_tokens" not in (path or "") and self.source.random() < 0.5
        response, connection = self._send(body | {"stream": streams}, headers or {}, path)
        raw, kind = response.read(), response.headers.get_content_type()
        connection.close()
        reply = Reply(response.status)
        if response.status != 200 or "count_tokens" in (path or ""):
            return reply
        if kind == "text/event-stream":
            _from_events(self.protocol, [data for _, data in events(raw)], reply)
        else:
            _from_body(self.protocol, json.loads(raw), reply)
        reply.numbers = set(map(int, NUMBER.findall(raw.decode())))
        if reply.ending in GOOD_ENDINGS:
            self.delivered |= reply.numbers
        return reply

    def _send(self, body, headers, path=None):
        address = urllib.parse.urlsplit(self.url)
        connection = http.client.HTTPConnection(address.hostname, address.port, timeout=30)
        named = {"Authorization": f"Bearer {self.sid}", "Content-Type": "application/json"}
        if self.agent:
            named |= {"User-Agent": "claude-cli/2", "X-Claude-Code-Agent-Id": self.agent}
        data = json.dumps(body).encode(errors="surrogatepass")
        connection.request("POST", path or PATHS[self.protocol], data, named | headers)
        return connection.getresponse(), connection

    def _take(self, reply):
        """Go on from a reply: with the results of its calls, or a word of the user."""
        self.last = reply
        if reply.status != 200 or not reply.ending:
            return
        self.names += [reply.name] if reply.name else []
        self.steps += [reply.said, self._results(reply.calls) or self._user("next")]

    # Forms of the protocols

    def _body(self, steps):
        items = [item for step in steps for item in step]
        body = {"tools": TOOLS[self.protocol], "max_tokens": self.source.choice([500, 500, 500, 10])}
        if self.protocol == "responses":
            return {"tools": TOOLS["responses"], "input": items, "instructions": f"be {self.agent or 'good'}"}
        if self.protocol == "messages":
            return body | {"system": f"be {self.agent or 'good'}", "messages": items}
        return body | {"messages": [{"role": "system", "content": f"be {self.agent or 'good'}"}, *items]}

    def _user(self, text):
        return [{"role": "user", "content": f"@{self.sid}@ {text} {self.source.randrange(3)}"}]

    def _said(self, text):
        return [{"role": "assistant", "content": text}]

    def _results(self, calls):
        text = f"@{self.sid}@ result"
        if self.protocol == "responses":
            return [{"type": "function_call_output", "call_id": call, "output": text} for call in calls]
        if self.protocol == "chat":
            return [{"role": "tool", "tool_call_id": call, "content": text} for call in calls]
        blocks = [{"type": "tool_result", "tool_use_id": call, "content": text} for call in calls]
        return [{"role": "user", "content": blocks}] if blocks else []

    def _text_of(self, part):
        """The text in the beginning of a stream."""
        whole = part[: part.rfind(b"\n\n") + 2]
        found = [data for _, data in events(whole)]
        if self.protocol == "chat":
            deltas = [data["choices"][0]["delta"] for data in found if data["choices"]]
            return "".join(delta.get("content") or "" for delta in deltas)
        if self.protocol == "messages":
            return "".join(data["delta"].get("text", "") for data in found if "delta" in data)
        return "".join(data["delta"] for data in found if data["type"] == "response.output_text.delta")


def _objects(value):
    if isinstance(value, dict):
        yield value
    for part in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _objects(part)


def _change(source, node):
    for name in TEXT_KEYS:
        if isinstance(node.get(name), str) and not MARK.search(node[name]):
            node[name] = source.choice([node[name].strip(), node[name] + " changed", "", '{"path": "x"}'])
    for name in HANDLE_KEYS:
        if name in node and source.random() < 0.4:
            del node[name]


def _from_body(protocol, body, reply):
    if protocol == "chat":
        choice = body["choices"][0]
        reply.said, reply.ending = [choice["message"]], choice["finish_reason"]
        reply.calls = [call["id"] for call in choice["message"].get("tool_calls") or ()]
    elif protocol == "messages":
        reply.said, reply.ending = [{"role": "assistant", "content": body["content"]}], body["stop_reason"]
        reply.calls = [block["id"] for block in body["content"] if block["type"] == "tool_use"]
    else:
        reply.said, reply.ending, reply.name = body["output"], body["status"], body["id"]
        reply.calls = [item["call_id"] for item in body["output"] if item["type"] == "function_call"]


def _from_events(protocol, found, reply):
    if protocol == "responses":
        last = found[-1]
        if last["type"] in ("response.completed", "response.incomplete"):
            _from_body(protocol, last["response"], reply)
    elif protocol == "messages":
        _from_blocks(found, reply)
    else:
        _from_chunks(found, reply)


def _from_chunks(found, reply):
    message, calls = {"role": "assistant", "content": ""}, {}
    for choice in (choice for data in found for choice in data.get("choices", ())):
        delta = choice["delta"]
        for name in ("content", "reasoning_content"):
            if delta.get(name):
                message[name] = message.get(name, "") + delta[name]
        for part in delta.get("tool_calls") or ():
            call = calls.setdefault(part["index"], {"type": "function", "function": {"arguments": ""}})
            call.setdefault("id", part.get("id"))
            function = part.get("function", {})
            call["function"].setdefault("name", function.get("name"))
            call["function"]["arguments"] += function.get("arguments") or ""
        reply.ending = choice["finish_reason"] or reply.ending
    if calls:
        message["tool_calls"] = list(calls.values())
    reply.said, reply.calls = [message], [call["id"] for call in calls.values()]


def _from_blocks(found, reply):
    blocks, pieces = [], {}
    for data in found:
        if data["type"] == "content_block_start":
            blocks.append(dict(data["content_block"]))
        elif data["type"] == "content_block_delta":
            delta, block = data["delta"], blocks[data["index"]]
            if delta["type"] == "input_json_delta":
                pieces[data["index"]] = pieces.get(data["index"], "") + delta["partial_json"]
            else:
                name = delta["type"].removesuffix("_delta")
                block[name] = block.get(name, "") + delta[name]
        elif data["type"] == "message_delta":
            reply.ending = data["delta"]["stop_reason"]
    for index, piece in pieces.items():
        with contextlib.suppress(json.JSONDecodeError):  # cut off in its midst
            blocks[index]["input"] = json.loads(piece)
    reply.said = [{"role": "assistant", "content": blocks}]
    reply.calls = [block["id"] for block in blocks if block["type"] == "tool_use"]

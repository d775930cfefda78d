"""What was translated once is not read again, and nothing else changes by it."""

import orjson
import pytest

from slime.agent.adapters.anthropic_wire import AnthropicWire
from slime.agent.adapters.chat_wire import ChatWire
from slime.agent.adapters.translations import Translations
from slime.agent.adapters.wire import AdapterError

CALL = {"type": "tool_use", "id": "t1", "name": "Read", "input": {"path": "a"}}
ANTHROPIC = [
    {"role": "user", "content": [{"type": "text", "text": "hello"}]},
    {"role": "assistant", "content": [{"type": "text", "text": "I look."}, CALL]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "text"}]},
]
CHAT = [
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": None, "tool_calls": [{"id": "t1", "function": {"name": "f"}}]},
    {"role": "tool", "tool_call_id": "t1", "content": [{"type": "text", "text": "x"}]},
]


def body(messages, **more):
    return orjson.loads(orjson.dumps({"model": "m", "max_tokens": 5, "messages": messages, **more}))


@pytest.mark.parametrize(("wire", "messages"), [(AnthropicWire(), ANTHROPIC), (ChatWire(), CHAT)])
def test_a_history_that_is_sent_again_gives_the_same_messages(wire, messages):
    known = Translations()
    for length in range(1, len(messages) + 1):
        part = body(messages[:length])
        assert wire.translate(part, {}, known).messages == wire.translate(part, {}).messages
    again = wire.translate(body(messages), {}, known).messages
    assert all(a is b for a, b in zip(again, wire.translate(body(messages), {}, known).messages, strict=True))


@pytest.mark.parametrize(("wire", "messages"), [(AnthropicWire(), ANTHROPIC), (ChatWire(), CHAT)])
def test_a_message_that_cannot_be_read_is_refused_each_time_with_its_place(wire, messages):
    known = Translations()
    for place in (1, 2):
        faulty = [*messages[:place], {"role": "oracle", "content": "x"}]
        with pytest.raises(AdapterError, match=rf"messages\[{place}\]\.role"):
            wire.translate(body(faulty), {}, known)


def test_a_tool_that_is_loaded_later_is_told_with_the_definition_that_it_has_now():
    known, loads = Translations(), {"type": "tool_reference", "tool_name": "Late"}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [loads]}
    messages = [*ANTHROPIC[:2], {"role": "user", "content": [result]}]
    for said in ("first", "second"):
        tool = {"name": "Late", "description": said, "input_schema": {}, "defer_loading": True}
        told = AnthropicWire().translate(body(messages, tools=[tool]), {}, known).messages
        assert said in told[-1]["content"]


def test_what_is_remembered_is_bounded():
    known, calls = Translations(kept_bytes=100), []

    def ask(size):
        text = "x" * size
        return known.of({"content": text}, lambda: calls.append(size) or [{"role": "user", "content": text}])

    for size in (40, 40, 41, 200, 200, 41, 42, 41):
        assert ask(size)[0]["content"] == "x" * size
    assert calls == [40, 41, 200, 200, 42, 41]

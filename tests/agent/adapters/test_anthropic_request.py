"""Messages of real clients give one common form, however a client re-sends them."""

import pytest

from slime.agent.adapters.wire import Origin
from slime.agent.messages import handles_of
from tests.agent.adapters.anthropic_kit import PNG, REQUESTS, one, real, translate

NAMED_MAIN = Origin("main", "main")


@pytest.mark.parametrize("name", REQUESTS)
def test_bodies_of_every_client_are_understood(name):
    request = real(name)
    assert request.messages
    assert all(message["role"] in ("system", "user", "assistant", "tool") for message in request.messages)
    assert not any("billing" in str(message["content"]) for message in request.messages)


@pytest.mark.parametrize(
    "name, origin",
    [
        ("claude_first", NAMED_MAIN),
        ("claude_turn4", NAMED_MAIN),
        ("claude_after_compaction", NAMED_MAIN),
        ("claude_main_after_subagent", NAMED_MAIN),
        ("claude_subagent", Origin("subagent", "nt-id")),
        ("old_claude_subagent", Origin("subagent", "nt-id")),
        ("old_claude_title", Origin("side")),
        ("opencode_turn4", NAMED_MAIN),
        ("sdk_turn4", Origin()),
    ],
)
def test_the_origin_of_a_request_is_told(name, origin):
    assert real(name).origin == origin


@pytest.mark.parametrize("name", ["claude_turn4", "opencode_turn4", "sdk_turn4", "litellm_turn4"])
def test_replayed_turns_carry_the_handles_that_the_server_minted(name):
    turns = [message for message in real(name).messages if message["role"] == "assistant"]
    assert [handles_of(turn) for turn in turns] == [
        (f"sig_{number + 1:024x}", f"toolu_{number:024x}") for number in range(3)
    ]
    assert [turn["reasoning_content"] for turn in turns] == ["reasoning 1", "reasoning 2", "reasoning 3"]


def test_a_system_message_in_the_midst_keeps_its_place():
    roles = [message["role"] for message in real("claude_after_compaction").messages]
    assert roles == ["system", "user", "system", "assistant", "tool", "user", "system"]


def test_the_billing_header_changes_nothing():
    def told(suffix):
        header = {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1.332.{suffix};"}
        system = [header, {"type": "text", "text": "You are Claude."}, {"type": "text", "text": "Be brief."}]
        return one("Hi.", system=system)

    assert told("abc") == told("def") == one("Hi.", system="You are Claude.\nBe brief.")


def test_moved_cache_marks_text_blocks_and_false_errors_give_equal_messages():
    mark = {"cache_control": {"type": "ephemeral"}}
    call = {"type": "tool_use", "id": "t1", "name": "Bash", "input": {"x": 1}}
    result = {"type": "tool_result", "tool_use_id": "t1"}

    def told(user, system, called, output, **flags):
        return translate(
            [
                {"role": "user", "content": user},
                {"role": "system", "content": system},
                {"role": "assistant", "content": [called]},
                {"role": "user", "content": [{**result, "content": output, **flags}]},
            ]
        ).messages

    text = [{"type": "text", "text": "a"}]
    marked = [{"type": "text", "text": "a", **mark}]
    first = told(marked, marked, {**call, **mark}, marked)
    assert first == told("a", "a", call, "a", is_error=False)
    assert first == told(text, text, call, text, is_error=None, **mark)


def test_each_tool_result_is_a_message_before_the_users_words():
    content = [
        {"type": "text", "text": "And then?"},
        {"type": "tool_result", "tool_use_id": "t1", "content": "one"},
        {"type": "tool_result", "tool_use_id": "t2", "content": [{"type": "text", "text": "two"}]},
        {"type": "tool_result", "tool_use_id": "t3"},
    ]
    assert one(content) == [
        {"role": "tool", "tool_call_id": "t1", "content": "one"},
        {"role": "tool", "tool_call_id": "t2", "content": "two"},
        {"role": "tool", "tool_call_id": "t3", "content": ""},
        {"role": "user", "content": "And then?"},
    ]


@pytest.mark.parametrize(
    "given, told",
    [
        ("Exit code 1", "Error: Exit code 1"),
        ("Error: no such file", "Error: no such file"),
        ("<tool_use_error>bad</tool_use_error>", "<tool_use_error>bad</tool_use_error>"),
        ("", "Error"),
        ([], "Error"),
    ],
)
def test_a_failed_tool_is_told_as_an_error(given, told):
    result = {"type": "tool_result", "tool_use_id": "t", "content": given, "is_error": True}
    assert one([result])[0]["content"] == told


def test_a_failed_tool_that_gives_an_image_is_told_as_an_error():
    result = {"type": "tool_result", "tool_use_id": "t", "is_error": True}
    content = one([{**result, "content": [{"type": "image", "source": PNG}]}])[0]["content"]
    assert [part["type"] for part in content] == ["text", "image_url"]


def test_images_pass_as_parts_with_the_text_around_them():
    content = [
        {"type": "text", "text": "Look:"},
        {"type": "image", "source": PNG},
        {"type": "image", "source": {"type": "url", "url": "https://x/y.png"}},
        {"type": "text", "text": ""},
    ]
    assert one(content)[0]["content"] == [
        {"type": "text", "text": "Look:"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
        {"type": "image_url", "image_url": {"url": "https://x/y.png"}},
    ]
    tool = real("claude_image_result").messages[-1]
    assert tool["role"] == "tool" and tool["content"][0]["type"] == "image_url"


def test_documents_and_search_results_are_read_as_text():
    content = [
        {
            "type": "document",
            "title": "T",
            "source": {"type": "text", "media_type": "text/plain", "data": "body"},
        },
        {"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "part"}]}},
        {
            "type": "search_result",
            "title": "S",
            "source": "u",
            "content": [{"type": "text", "text": "found"}],
        },
    ]
    assert one(content)[0]["content"] == "T\nbody\npart\nS (u)\nfound"


def test_thinking_is_reasoning_and_hidden_thinking_is_a_handle():
    content = [
        {"type": "thinking", "thinking": "a", "signature": "s1"},
        {"type": "redacted_thinking", "data": "s2"},
        {"type": "thinking", "thinking": "b", "signature": ""},
        {"type": "text", "text": "c"},
    ]
    (message,) = one(content, role="assistant")
    assert message == {
        "role": "assistant",
        "content": "c",
        "reasoning_content": "a\nb",
        "handles": ["s1", "s2"],
    }


def test_work_of_a_servers_tool_is_told_as_text():
    content = [
        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "q"}},
        {
            "type": "web_search_tool_result",
            "tool_use_id": "s",
            "content": [{"type": "web_search_result", "title": "T", "url": "u", "encrypted_content": "XX"}],
        },
    ]
    (message,) = one(content, role="assistant")
    assert '"query":"q"' in message["content"] and '"url":"u"' in message["content"]
    assert "XX" not in message["content"]


def test_arguments_that_a_client_had_to_wrap_are_what_was_sampled():
    def arguments(given):
        content = [{"type": "tool_use", "id": "t", "name": "Bash", "input": given}]
        return one(content, role="assistant")[0]["tool_calls"][0]["function"]["arguments"]

    assert arguments({"_raw_arguments": '{"x'}) == '{"x'
    assert arguments({"__unparsedToolInput": {"raw": '{"ü', "len": 3}}) == '{"ü'
    cut = {"__unparsedToolInput": {"raw": "{", "len": 5000}}
    assert arguments(cut) == cut
    assert arguments({"x": 1}) == {"x": 1}
    assert [arguments("ls"), arguments(["é"]), arguments(3)] == ['"ls"', '["é"]', "3"]
    turns = [message for message in real("claude_bad_arguments").messages if message["role"] == "assistant"]
    assert turns[0]["tool_calls"][0]["function"]["arguments"] == '{"command": "ls'

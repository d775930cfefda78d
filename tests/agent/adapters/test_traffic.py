"""Requests of real clients, as their headers and prompts were captured, are told apart; all else is main."""

import json

import pytest

from slime.agent.adapters.traffic import CLIENTS, origin_of
from slime.agent.adapters.wire import Origin

NAMED_MAIN = Origin("main", "main")
CLAUDE = {"User-Agent": "claude-cli/2.1.332 (external, sdk-cli)", "X-Claude-Code-Session-Id": "s"}
OLD_CLAUDE = {"User-Agent": "claude-cli/2.1.197 (external, sdk-py)", "X-Claude-Code-Session-Id": "s"}
CLAUDE_SYSTEM = "You are a Claude agent, built on Anthropic's Claude Agent SDK.\nBe brief."
OPENCODE = {"User-Agent": "opencode/1.18.33 ai-sdk/provider-utils/4.0.23", "x-session-id": "ses_1"}
QWEN = {"User-Agent": "QwenCode/0.24.4 (linux; x64)"}
QWEN_SUB = (
    "You are a general-purpose agent.\n\nImportant Rules:\n"
    " - You operate in non-interactive mode: do not ask the user questions; proceed with available context.\n"
)
QWEN_COMPACTION = "First, reason in your <analysis> block. Then, produce the <state_snapshot> XML."
CLAUDE_COMPACTION = (
    "CRITICAL: Respond with TEXT ONLY. Do NOT call any tools.\n\n"
    "Your task is to create a detailed summary of the conversation so far, paying close attention to"
)


def codex(**metadata):
    return {"originator": "codex_exec", "thread-id": "t1", "x-codex-turn-metadata": json.dumps(metadata)}


def tools(*names):
    return [{"type": "function", "function": {"name": name, "parameters": {}}} for name in names]


def chat(system, *texts):
    roles = ["user", "assistant"] * len(texts)
    return [{"role": "system", "content": system}] + [
        {"role": role, "content": text} for role, text in zip(roles, texts, strict=False)
    ]


BASH = tools("Bash", "Edit")
MAIN = [
    (CLAUDE, chat(CLAUDE_SYSTEM, "Fix it."), BASH),
    (OLD_CLAUDE, chat(CLAUDE_SYSTEM, "Fix it."), BASH),
    (codex(request_kind="turn", thread_source="user"), chat("dev", "Fix it."), tools("exec_command")),
    (OPENCODE, chat("You are opencode.", "Fix it."), tools("bash")),
    (QWEN, chat("You are Qwen Code, a non-interactive CLI agent", "Fix it."), tools("edit")),
]


@pytest.mark.parametrize("headers, messages, offered", MAIN)
def test_the_main_loop_of_every_client_is_main(headers, messages, offered):
    assert origin_of(headers, messages=messages, tools=offered, max_tokens=32000) == NAMED_MAIN


@pytest.mark.parametrize(
    "headers, messages, offered, agent",
    [
        ({**CLAUDE, "x-claude-code-agent-id": "a1"}, chat("Agent", "Look."), BASH, "a1"),
        ({**OLD_CLAUDE, "X-Claude-Code-Agent-Id": "a2"}, chat("Agent", "Look."), BASH, "a2"),
        (
            {**codex(thread_source="subagent"), "x-openai-subagent": "collab_spawn"},
            chat("d", "L"),
            BASH,
            "t1",
        ),
        (codex(thread_source="subagent"), chat("d", "L"), BASH, "t1"),
        ({**OPENCODE, "x-parent-session-id": "ses_0"}, chat("You are opencode.", "L"), BASH, "ses_1"),
    ],
)
def test_a_subagent_is_known_by_its_header_and_named(headers, messages, offered, agent):
    assert origin_of(headers, messages=messages, tools=offered) == Origin("subagent", agent)


def test_a_qwen_subagent_keeps_its_name_over_its_turns_and_others_have_another():
    first = origin_of(QWEN, messages=chat(QWEN_SUB, "Look at a."), tools=BASH)
    later = origin_of(QWEN, messages=chat(QWEN_SUB, "Look at a.", "Well.", "Go on."), tools=BASH)
    other = origin_of(QWEN, messages=chat(QWEN_SUB, "Look at b."), tools=BASH)
    assert first.kind == "subagent" and first.agent
    assert first == later != other


@pytest.mark.parametrize(
    "headers, messages, offered",
    [
        (CLAUDE, chat(CLAUDE_SYSTEM, "Fix it.", "ok", f"<system-reminder>\n{CLAUDE_COMPACTION}"), BASH),
        (CLAUDE, chat("You are a helpful AI assistant tasked with summarizing conversations.", "x"), ()),
        (codex(request_kind="compaction", thread_source="user"), chat("d", "Fix.", "ok", "Sum up."), ()),
        ({**codex(), "x-openai-subagent": "compact"}, chat("d", "Fix it."), ()),
        (OPENCODE, chat("You are a context summarization agent. You are given", "Here is"), ()),
        (QWEN, chat("You are the component that summarizes a conversation", "a", "b", QWEN_COMPACTION), ()),
        (QWEN, chat("You are Qwen Code", "a", "b", f"Summarize.\n{QWEN_COMPACTION}"), BASH),
    ],
)
def test_a_compaction_is_known_by_its_prompt_or_metadata(headers, messages, offered):
    assert origin_of(headers, messages=messages, tools=offered) == Origin("compaction")


def test_the_compaction_of_a_subagent_names_it():
    headers = {**CLAUDE, "x-claude-code-agent-id": "a1"}
    origin = origin_of(headers, messages=chat("Agent", CLAUDE_COMPACTION), tools=BASH)
    assert origin == Origin("compaction", "a1")


def test_an_answered_compaction_prompt_in_the_history_is_no_compaction():
    messages = chat(CLAUDE_SYSTEM, CLAUDE_COMPACTION, "<summary>", "Go on.")
    assert origin_of(CLAUDE, messages=messages, tools=BASH) == NAMED_MAIN


def test_a_tool_result_that_quotes_the_compaction_prompt_is_no_compaction():
    messages = [*chat(CLAUDE_SYSTEM, "Read.", "ok"), {"role": "tool", "content": CLAUDE_COMPACTION}]
    assert origin_of(CLAUDE, messages=messages, tools=BASH) == NAMED_MAIN


@pytest.mark.parametrize(
    "headers, messages, extra",
    [
        (OLD_CLAUDE, chat(CLAUDE_SYSTEM, "<session>"), {"wants_json": True}),
        (OLD_CLAUDE, chat(f"{CLAUDE_SYSTEM}\nGenerate a concise, sentence-case title (3-7 words)", "x"), {}),
        (CLAUDE, [{"role": "user", "content": "quota"}], {"max_tokens": 1}),
        (CLAUDE, [{"role": "user", "content": "\nWeb page content:\n---\n"}], {}),
        (OPENCODE, chat("You are a title generator. You output ONLY a thread title. Nothing else.", "x"), {}),
        (
            OPENCODE,
            chat("Summarize what was done in this conversation. Write like a pull request description."),
            {},
        ),
        (QWEN, chat("Generate a concise, sentence-case title", "x"), {"tools": tools("respond_in_schema")}),
        ({**codex(), "x-openai-subagent": "memory_consolidation"}, chat("d", "x"), {"tools": BASH}),
    ],
)
def test_titles_and_probes_are_side_requests(headers, messages, extra):
    assert origin_of(headers, messages=messages, **extra) == Origin("side")


@pytest.mark.parametrize(
    "messages, extra",
    [
        (chat("You are a title generator. You output ONLY a thread title.", "x"), {}),
        (chat("sys", "Answer as JSON."), {"wants_json": True}),
        (chat("sys", "Yes or no?"), {"max_tokens": 1}),
        (chat(QWEN_SUB, CLAUDE_COMPACTION), {}),
        ([], {}),
    ],
)
def test_a_program_on_an_sdk_is_always_main(messages, extra):
    headers = {"User-Agent": "Anthropic/Python 2.14.0"}
    assert origin_of(headers, messages=messages, **extra) == Origin()


@pytest.mark.parametrize("metadata", ["", "not json", "[1]", '"text"', "null"])
def test_turn_metadata_that_says_nothing_leaves_codex_main(metadata):
    headers = {"originator": "codex_exec", "x-codex-turn-metadata": metadata}
    assert origin_of(headers, messages=chat("d", "x"), tools=BASH) == NAMED_MAIN


def test_parts_of_text_and_images_are_read_as_text():
    content = [
        {"type": "text", "text": "See."},
        {"type": "image_url"},
        {"type": "text", "text": CLAUDE_COMPACTION},
    ]
    messages = [{"role": "user", "content": content}]
    assert origin_of(CLAUDE, messages=messages, tools=BASH).kind == "compaction"


def test_every_client_of_the_table_names_its_versions():
    assert all(any(letter.isdigit() for letter in facts.client) for facts in CLIENTS)

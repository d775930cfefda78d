"""Which part of a client a request comes from: its main loop, a sub-agent, a side request, a compaction.

Owns one table of facts about clients, read off the wire and out of the packages of the versions named there.
Invariant: what no fact recognises is ``main``, so that sampled tokens are left out of training on evidence
only. Looks at one request; knows no session, so a new root within a session is not seen here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from slime.agent.adapters.wire import Origin, OriginKind
from slime.agent.messages import Message


@dataclass(frozen=True, kw_only=True)
class ClientFacts:
    """How one client's requests can be told apart. A mark holds where a line begins with it.

    Attributes:
        client: the client, and the versions in which each fact was seen.
        signs: header and beginning of its value; one of them says that the client asks.
        subagent_header: present on requests of sub-agents only.
        name_header: names the sub-agent; without it the opening of the conversation does.
        subagent_system: mark in a sub-agent's system prompt.
        compaction_system: marks in the system prompt of a compaction.
        compaction_ask: marks in the last user message of a compaction.
        side_system: marks in the system prompt of a side request, which has no tools.
        side_ask: marks in the last user message of a side request, which has no tools.
        side_tool: a tool that only side requests offer, as their only one.
        json_is_side: a request for JSON without tools is a side request.
        one_token_is_side: a request for one token is a probe.
    """

    client: str
    signs: tuple[tuple[str, str], ...]
    subagent_header: str = ""
    name_header: str = ""
    subagent_system: str = ""
    compaction_system: tuple[str, ...] = ()
    compaction_ask: tuple[str, ...] = ()
    side_system: tuple[str, ...] = ()
    side_ask: tuple[str, ...] = ()
    side_tool: str = ""
    json_is_side: bool = False
    one_token_is_side: bool = False


CLIENTS: tuple[ClientFacts, ...] = (
    ClientFacts(
        client="Claude Code 2.1.332 and 2.1.197, and the claude-agent-sdk 0.2.189 that runs it",
        signs=(("user-agent", "claude-cli/"), ("x-claude-code-session-id", "")),
        subagent_header="x-claude-code-agent-id",
        name_header="x-claude-code-agent-id",
        compaction_system=("You are a helpful AI assistant tasked with summarizing conversations.",),
        compaction_ask=(
            "CRITICAL: Respond with TEXT ONLY.",
            "Your task is to create a detailed summary of th",
        ),
        side_system=("Generate a concise, sentence-case title",),
        side_ask=("Web page content:",),
        json_is_side=True,
        one_token_is_side=True,
    ),
    ClientFacts(
        client="Codex 0.171.0; what its header x-codex-turn-metadata says is read besides",
        signs=(("x-codex-turn-metadata", ""), ("originator", "codex")),
        subagent_header="x-openai-subagent",
        name_header="thread-id",
    ),
    ClientFacts(
        client="opencode 1.18.33",
        signs=(("user-agent", "opencode/"),),
        subagent_header="x-parent-session-id",
        name_header="x-session-id",
        compaction_system=("You are a context summarization agent.",),
        side_system=(
            "You are a title generator. You output ONLY a thread title.",
            "Summarize what was done in this conversation. Write like a pull request description.",
        ),
    ),
    ClientFacts(
        client="qwen-code 0.24.4 and 0.15.10",
        signs=(("user-agent", "QwenCode/"),),
        subagent_system=" - You operate in non-interactive mode: do not ask the user questions;",
        compaction_system=("You are the component that summarizes ",),
        compaction_ask=(
            "First, reason in your <analysis> block. Then, produce the <state_snapshot> XML.",
            "First, reason in your scratchpad. Then, generate the <state_snapshot>.",
        ),
        side_system=("Generate a concise, sentence-case title",),
        side_tool="respond_in_schema",
    ),
)

# Values of Codex' x-openai-subagent that name something else than a sub-agent of the task.
_CODEX_LABELS: dict[str, OriginKind] = {"compact": "compaction", "memory_consolidation": "side"}


def origin_of(
    headers: Mapping[str, str],
    *,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] = (),
    wants_json: bool = False,
    max_tokens: int | None = None,
) -> Origin:
    """Which part of the client asks.

    Args:
        headers: of the HTTP request; names in any case.
        messages: in the common form (`slime.agent.messages`).
        tools: in the common form.
        wants_json: the client demands an answer of a JSON schema.
        max_tokens: the client's limit.
    """
    known = {name.lower(): value for name, value in headers.items()}
    facts = next((facts for facts in CLIENTS if _sent_by(facts, known)), None)
    if facts is None:
        return Origin()
    names = [str(tool.get("function", {}).get("name", "")) for tool in tools]
    system, ask = _system(messages), _ask(messages)
    agent = _agent(facts, known, messages) if _is_subagent(facts, known, system) else ""
    if _marked(system, facts.compaction_system) or _marked(ask, facts.compaction_ask):
        return Origin("compaction", agent)
    if _is_side(facts, system, ask, names, wants_json, max_tokens):
        return Origin("side", agent)
    kind = _codex_kind(known) or ("subagent" if agent else "main")
    return Origin(kind, "main" if kind == "main" else agent)


def _sent_by(facts: ClientFacts, headers: Mapping[str, str]) -> bool:
    return any(name in headers and headers[name].startswith(start) for name, start in facts.signs)


def _is_subagent(facts: ClientFacts, headers: Mapping[str, str], system: str) -> bool:
    label = headers.get(facts.subagent_header)
    if label is not None:
        return label not in _CODEX_LABELS
    return _codex_metadata(headers).get("thread_source") == "subagent" or _marked(
        system, (facts.subagent_system,)
    )


def _is_side(
    facts: ClientFacts, system: str, ask: str, tools: list[str], wants_json: bool, max_tokens: int | None
) -> bool:
    if tools:
        return tools == [facts.side_tool]
    if (wants_json and facts.json_is_side) or (max_tokens == 1 and facts.one_token_is_side):
        return True
    return _marked(system, facts.side_system) or _marked(ask, facts.side_ask)


def _marked(text: str, marks: Sequence[str]) -> bool:
    """Whether a line of the text begins with one of the marks that are not empty."""
    return any(mark and (text.startswith(mark) or f"\n{mark}" in text) for mark in marks)


def _agent(facts: ClientFacts, headers: Mapping[str, str], messages: Sequence[Message]) -> str:
    """The sub-agent's name; from how its conversation opens where the client gives none."""
    named = headers.get(facts.name_header) or headers.get(facts.subagent_header)
    if named:
        return named
    user = next((_text(message) for message in messages if message.get("role") == "user"), "")
    opening = f"{_system(messages)}\0{user}".encode(errors="surrogatepass")
    return hashlib.blake2b(opening, digest_size=8).hexdigest()


def _codex_kind(headers: Mapping[str, str]) -> OriginKind | None:
    if _codex_metadata(headers).get("request_kind") == "compaction":
        return "compaction"
    return _CODEX_LABELS.get(headers.get("x-openai-subagent", ""))


def _codex_metadata(headers: Mapping[str, str]) -> Mapping[str, Any]:
    """What Codex says of its turn, nothing where it is no JSON object."""
    try:
        said = orjson.loads(headers.get("x-codex-turn-metadata") or "{}")
    except orjson.JSONDecodeError:
        return {}
    return said if isinstance(said, dict) else {}


def _system(messages: Sequence[Message]) -> str:
    """The text of the system messages that open the conversation."""
    texts: list[str] = []
    for message in messages:
        if message.get("role") != "system":
            break
        texts.append(_text(message))
    return "\n".join(texts)


def _ask(messages: Sequence[Message]) -> str:
    """The text of the user message that is to be answered, empty where something else is."""
    last = next((message for message in reversed(messages) if message.get("role") != "system"), None)
    return _text(last) if last is not None and last.get("role") == "user" else ""


def _text(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    return "\n".join(str(part.get("text", "")) for part in parts if isinstance(part, Mapping))

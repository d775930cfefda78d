"""What a protocol has to provide, and the values that pass between it and the adapter.

A `WireProtocol` translates a body into a `ModelRequest`, gives a `ReplyWriter` that puts the answer on the
wire, and shapes errors. Invariant: the writer mints every handle by which the client's next request names
this turn. Knows neither tokens nor sessions.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from slime.agent.adapters.translations import Translations
from slime.agent.messages import Message
from slime.agent.parsing.events import OutputEvent
from slime.errors import SlimeError

OriginKind: TypeAlias = Literal["main", "subagent", "side", "compaction"]
ErrorKind: TypeAlias = Literal[
    "authentication",
    "invalid_request",
    "context_overflow",
    "rate_limit",
    "overloaded",
    "upstream",
    "not_found",
    "too_large",
    "closed",
]


@dataclass(frozen=True)
class Origin:
    """Which part of the client asks.

    Attributes:
        kind: ``main``, a ``subagent``, a ``side`` request (title, probe), or a ``compaction`` of the history.
        agent: names the sub-agent; ``main`` for the main one of clients that are known to tell their agents
            apart, empty where they do not.
    """

    kind: OriginKind = "main"
    agent: str = ""


@dataclass(frozen=True, kw_only=True)
class ModelRequest:
    """A client's request in the common form.

    Attributes:
        messages: see `slime.agent.messages`.
        tools: ``{"type": "function", "function": {"name", "description", "parameters"}}`` each.
        max_tokens: the client's limit; it can only lower the session's.
        stop: the client's stop strings.
        tool_choice: ``auto``, ``required``, ``none``, or the name of a tool.
        continues: a handle whose turn the messages follow (Responses' `previous_response_id`).
        references: handles that stand in the messages for a turn whose words the client did not send.
        extra: what the protocol's own writer needs to know.
    """

    messages: Sequence[Message]
    tools: Sequence[dict[str, Any]] = ()
    model: str = "slime-actor"
    stream: bool = False
    max_tokens: int | None = None
    stop: Sequence[str] = ()
    tool_choice: str = "auto"
    parallel_tool_calls: bool = True
    continues: str | None = None
    references: Sequence[str] = ()
    origin: Origin = Origin()
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Usage:
    """True token counts of a turn; `prompt_tokens` include the cached ones."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How a turn ended.

    Attributes:
        finish_reason: ``stop``, ``length`` or ``abort``.
        stop_sequence: the client's stop string that was found.
    """

    finish_reason: str
    usage: Usage
    stop_sequence: str | None = None


class AdapterError(SlimeError):
    """A request that cannot be answered; a protocol gives it its own shape.

    Attributes:
        kind: decides status and type on the wire.
        retry_after: seconds after which a retry can help.
    """

    def __init__(self, kind: ErrorKind, message: str, *, retry_after: float | None = None) -> None:
        self.kind = kind
        self.retry_after = retry_after
        super().__init__(message)


class ReplyWriter(abc.ABC):
    """One answer on the wire. Methods return the bytes to send, which may be none.

    For a client that does not stream the same calls are made, their bytes are dropped, and `whole` is sent.

    Attributes:
        handles: everything minted for this turn that the client may send back, tool call ids among them.
        tool_ids: the id of each tool call, by its index.
    """

    handles: list[str]
    tool_ids: list[str]

    @abc.abstractmethod
    def begin(self, usage: Usage) -> bytes:
        """Open the answer, before its first token is there."""

    @abc.abstractmethod
    def event(self, event: OutputEvent) -> bytes:
        """A piece of the output."""

    @abc.abstractmethod
    def keepalive(self) -> bytes:
        """What makes this protocol's clients wait on."""

    @abc.abstractmethod
    def end(self, ending: Ending) -> bytes:
        """Close the answer."""

    @abc.abstractmethod
    def error(self, error: AdapterError) -> bytes:
        """Close the answer after a failure in its midst."""

    @abc.abstractmethod
    def whole(self, ending: Ending) -> dict[str, Any]:
        """The body of an answer that is not streamed; called after `end`."""


class WireProtocol(abc.ABC):
    """A protocol: stateless."""

    keepalive_seconds: float = 15.0

    @abc.abstractmethod
    def translate(
        self, body: Mapping[str, Any], headers: Mapping[str, str], known: Translations | None = None
    ) -> ModelRequest:
        """The request in the common form.

        Args:
            known: of the session, for protocols whose histories are translated message by message.

        Raises:
            AdapterError: ``invalid_request``, naming the field and place: ``messages[3].content[0].type``.
        """

    @abc.abstractmethod
    def writer(self, request: ModelRequest) -> ReplyWriter:
        """A writer for the answer to `request`."""

    @abc.abstractmethod
    def error(self, error: AdapterError) -> tuple[int, dict[str, Any]]:
        """Status and body of a refusal."""

"""The sessions that an adapter serves.

Invariant: a name is served from `open` to `close`; what is in flight at the close gets its time, then it is
cancelled, whoever stops waiting for it. Knows neither HTTP nor protocols.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from slime.agent.adapters.exchange import StoredReply
from slime.agent.adapters.translations import Translations
from slime.agent.adapters.wire import AdapterError
from slime.agent.session import TokenSession
from slime.agent.template import ChatTemplate
from slime.agent.trajectory import TrajectoryManager
from slime.agent.tree import Node
from slime.agent.turn import Turn
from slime.errors import ConfigError
from slime.utils.request_scope import RequestScope, current_scope

CLOSED_NAMES = 4096
"""So many of the newest closed names are told that they are closed."""
CANCEL_SECONDS = 5.0
"""What a cancelled request gets to abort the engine's and to record what was sampled."""


# A name goes into paths, and into a header of the engine's.
_NAME = re.compile(r"[!-~]{1,256}\Z")


@dataclass(eq=False)
class Session:
    """One agent run.

    Attributes:
        sampling_defaults: sampling parameters of every turn; clients only lower the token limit.
        max_context_tokens: prompt and answer together; 0: the engine's own limit.
        turns: answers that the client got.
        running: answers that are being sampled.
        replies: answers for clients that ask again, until the client goes on from them.
        asked: requests that are being answered, by their prompt's place.
        translations: of the messages that were sent so far.
        scope: of the rollout that opened the session.
    """

    tokens: TokenSession
    sampling_defaults: Mapping[str, Any]
    max_context_tokens: int
    turns: int = 0
    running: int = 0
    inflight: set[asyncio.Task[Any]] = field(default_factory=set)
    replies: dict[Turn, StoredReply] = field(default_factory=dict)
    asked: dict[Node, asyncio.Event] = field(default_factory=dict)
    translations: Translations = field(default_factory=Translations)
    scope: RequestScope | None = field(default_factory=current_scope)

    @property
    def is_stopped(self) -> bool:
        """Whether its rollout wants no more tokens."""
        return self.scope is not None and self.scope.stopped


class Sessions:
    """Open sessions by name.

    Args:
        allow_unknown: open a session for any name that is asked for.
    """

    def __init__(self, manager: TrajectoryManager, template: ChatTemplate, *, allow_unknown: bool) -> None:
        self.open_by_name: dict[str, Session] = {}
        self._manager = manager
        self._template = template
        self._allow_unknown = allow_unknown
        self._closed: dict[str, None] = {}
        self._closing: dict[str, asyncio.Task[None]] = {}

    def open(
        self,
        sid: str,
        *,
        sampling_defaults: Mapping[str, Any] | None = None,
        max_context_tokens: int = 0,
    ) -> None:
        """Begin a session.

        Raises:
            ValueError: there is or was one of this name, or it is no name: 1 to 256 visible ASCII characters.
            ConfigError: a sampling parameter of the wrong type.
        """
        if not _NAME.match(sid):
            raise ValueError(f"a session's name has 1 to 256 visible ASCII characters, not {sid[:300]!r}")
        if sid in self.open_by_name or sid in self._closed:
            state = "exists already" if sid in self.open_by_name else "is closed"
            raise ValueError(f"session {sid!r} {state}")
        tokens = TokenSession(sid, self._manager, self._template)
        self.open_by_name[sid] = Session(
            tokens, sampling_parameters(sampling_defaults or {}), max_context_tokens
        )

    def get(self, sid: str) -> Session:
        """The session of a request.

        Raises:
            AdapterError: ``closed`` or ``authentication``.
        """
        session = self.open_by_name.get(sid)
        if session is not None:
            return session
        if sid in self._closed:
            raise AdapterError("closed", "this session is closed")
        if not self._allow_unknown or not _NAME.match(sid):
            raise AdapterError("authentication", "no open session has this id")
        self.open(sid)
        return self.open_by_name[sid]

    async def close(self, sid: str, *, wait_timeout: float) -> None:
        """End a session; returns when nothing of it is in flight. An unknown one is no error.

        Args:
            wait_timeout: seconds that requests in flight get to end; then they are cancelled.
        """
        session = self.open_by_name.pop(sid, None)
        if session is not None:
            self._closed[sid] = None
            while len(self._closed) > CLOSED_NAMES:
                del self._closed[next(iter(self._closed))]
            task = self._closing[sid] = asyncio.ensure_future(_end(session, wait_timeout))
            task.add_done_callback(lambda _: self._closing.pop(sid))
        if sid in self._closing:
            await asyncio.shield(self._closing[sid])


async def _end(session: Session, wait_timeout: float) -> None:
    for timeout in (wait_timeout, CANCEL_SECONDS):
        if session.inflight:
            await asyncio.wait(session.inflight, timeout=timeout)
        for task in session.inflight:
            task.cancel()


def sampling_parameters(given: Mapping[str, Any]) -> dict[str, Any]:
    """Sampling parameters as the engine takes them: those that are None left out, single stops as lists.

    Raises:
        ConfigError: one that the adapter itself works with has the wrong type.
    """
    params = {name: value for name, value in given.items() if value is not None}
    for name, kind in (("stop", str), ("stop_token_ids", int)):
        if isinstance(params.get(name), kind):
            params[name] = [params[name]]
        stops = params.get(name, [])
        if not isinstance(stops, list | tuple) or not all(isinstance(stop, kind) for stop in stops):
            raise ConfigError(
                f"{name} is {stops!r}", place="sampling_defaults", remedy=f"give a list of {kind.__name__}"
            )
    limit = params.get("max_new_tokens", 1)
    if not isinstance(limit, int) or limit < 1:
        raise ConfigError(
            f"max_new_tokens is {limit!r}", place="sampling_defaults", remedy="give a number of at least 1"
        )
    return params

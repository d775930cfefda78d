"""`RequestScope`: the engine requests that one rollout has in flight, and the way to end them early.

Invariant: once a scope is stopped, no request of it stays at an engine: those in flight are aborted until
they are answered, and later ones get an empty aborted answer without being sent. Code finds the scope that it
runs in by `current_scope`, whatever task or session that is. Knows nothing of what a rollout is.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from slime.errors import SlimeError

logger = logging.getLogger(__name__)
Abort = Callable[[str], Awaitable[None]]
REPEAT_SECONDS = 0.5
"""An abort that overtakes its request does nothing; so it is repeated as long as the request is in flight."""
_current: ContextVar[RequestScope | None] = ContextVar("slime_request_scope", default=None)


@dataclass(slots=True, kw_only=True)
class Call:
    """One engine call.

    Attributes:
        started: monotonic seconds.
        seconds: from sending to the answer, retries included; 0 while it is in flight.
        finish: ``stop``, ``length``, ``abort``, or the name of the error.
        versions: of the weights that sampled, oldest first.
    """

    rid: str
    started: float
    prompt_tokens: int
    seconds: float = 0.0
    tokens: int = 0
    finish: str = ""
    versions: tuple[str, ...] = ()


@dataclass(eq=False)
class RequestScope:
    """What one rollout has at engines.

    Attributes:
        timeout: most seconds that one call may take, or None.
        on_call: told of every call when it ends.
        fields: what each ``/generate`` says besides, where it does not say it itself.
        frozen: servers of models that the run does not train, by base URL: they get no `fields`.
        stopped: whether no more tokens are wanted.
        interrupted: whether a call, or all work before the first, was ended or refused because of that.
        calls: those in flight, by request id.
        ended: how many have ended.
        last: the one that ended last.
    """

    timeout: float | None = None
    on_call: Callable[[Call], None] | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)
    frozen: Collection[str] = ()
    stopped: bool = False
    interrupted: bool = False
    calls: dict[str, Call] = field(default_factory=dict)
    ended: int = 0
    last: Call | None = None
    _aborts: dict[str, Abort] = field(default_factory=dict)

    def fields_at(self, url: str) -> Mapping[str, Any]:
        """What a ``/generate`` there says besides; `url` is the server's base."""
        return {} if url in self.frozen else self.fields

    @contextlib.contextmanager
    def holding(self, rid: str, abort: Abort, prompt_tokens: int) -> Iterator[Call]:
        """Hold a request while the body waits for its answer, which it notes on the call."""
        call = Call(rid=rid, started=time.monotonic(), prompt_tokens=prompt_tokens)
        self.calls[rid], self._aborts[rid] = call, abort
        try:
            yield call
        except BaseException as error:
            call.finish = type(error).__name__
            raise
        finally:
            del self.calls[rid], self._aborts[rid]
            call.seconds = time.monotonic() - call.started
            self.ended, self.last = self.ended + 1, call
            self.interrupted |= self.stopped and call.finish == "abort"
            if self.on_call is not None:
                self.on_call(call)

    def refuse(self) -> dict[str, Any]:
        """What a call gets that comes after the stop: an engine's answer without a token."""
        self.interrupted = True
        return {
            "text": "",
            "output_ids": [],
            "meta_info": {"finish_reason": {"type": "abort"}, "output_token_logprobs": []},
        }

    async def stop(self, seconds: float) -> None:
        """End all calls, with what they have sampled; returns when they are answered, or after `seconds`."""
        self.stopped = True
        end = time.monotonic() + seconds
        while self._aborts and time.monotonic() < end:
            for rid, abort in list(self._aborts.items()):
                await self._abort(rid, abort, end)
            pause = min(REPEAT_SECONDS, max(end - time.monotonic(), 0.0))
            await self._until_answered(pause)

    async def _abort(self, rid: str, abort: Abort, end: float) -> None:
        try:
            async with asyncio.timeout(max(end - time.monotonic(), 0.1)):
                await abort(rid)
        except (SlimeError, TimeoutError) as error:
            logger.warning("request %s could not be aborted: %s", rid, error)

    async def _until_answered(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while self._aborts and time.monotonic() < end:
            await asyncio.sleep(0.01)


def current_scope() -> RequestScope | None:
    """The scope of the rollout that the calling code belongs to, if any."""
    return _current.get()


@contextlib.contextmanager
def entered(scope: RequestScope | None) -> Iterator[None]:
    """Make `scope` the current one in the body, and in the tasks that it starts."""
    token = _current.set(scope)
    try:
        yield
    finally:
        _current.reset(token)

"""Ending the rollouts of a group early, with what they have: to be continued later, or cut to what there is.

Invariant: a stop reaches rollouts that have not begun too; what runs in user code outside of engine calls is
not touched. Knows requests, not samples.
"""

from __future__ import annotations

import asyncio
import enum
from dataclasses import dataclass, field

from slime.utils.request_scope import RequestScope


class Stop(enum.Enum):
    """Why a group is stopped."""

    CONTINUE = "continue"
    """Its rollouts go back to the data source and are continued from where they stand."""
    CUT = "cut"
    """Its rollouts end here and count as truncated."""


@dataclass(eq=False)
class GroupStop:
    """The stop of one group; `reason` is None as long as it may run."""

    reason: Stop | None = None
    _scopes: list[RequestScope] = field(default_factory=list)

    def hold(self, scope: RequestScope) -> RequestScope:
        """Let a rollout's requests be stopped with the group."""
        scope.stopped = self.reason is not None
        self._scopes.append(scope)
        return scope

    async def stop(self, reason: Stop, seconds: float) -> None:
        """End all engine calls of the group; returns when they are answered, or after `seconds`."""
        self.reason = self.reason or reason
        await asyncio.gather(*(scope.stop(seconds) for scope in self._scopes))

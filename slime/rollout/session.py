"""What the rollouts of a process share with whoever changes weights, saves or stops: one `RolloutSession`.

Owns: the policy version that the engine samples by, the scheduler in use, the event log. Invariant: at most
one scheduler is in use; it is touched on the rollout loop only. Knows nothing of actors, and no file but the
log.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from typing import Any

from slime.errors import ConfigError
from slime.rollout.events import NO_LOG, EventLog
from slime.rollout.group_source import Source
from slime.rollout.inflight import IN_FLIGHT, Watchdog
from slime.rollout.scheduler import Scheduler

logger = logging.getLogger(__name__)


class RolloutSession:
    """Shared state of one process.

    Attributes:
        version: policy version of the engine, where somebody tells it (`weights_changed`).
        log: where decisions go.
    """

    def __init__(self) -> None:
        self.version: int | None = None
        self.log: EventLog = NO_LOG
        self._scheduler: Scheduler | None = None
        self._source: Source | None = None
        self._open: AsyncExitStack | None = None
        self._handed_out: dict[int, Sequence[Any]] = {}

    @contextmanager
    def using(self, scheduler: Scheduler) -> Iterator[None]:
        """Let this scheduler be the one in use while the body runs."""
        self._begin(scheduler)
        try:
            yield
        finally:
            self._scheduler = None

    def standing(self, source: Source) -> Scheduler | None:
        """The scheduler that stays open over steps, if there is one.

        Raises:
            ConfigError: it takes its groups from another data source.
        """
        if self._open is not None and self._source is not source:
            raise ConfigError(
                "rollouts of another data source are in flight",
                place="data_source",
                remedy="pass the same data source in every step",
            )
        return self._scheduler if self._open is not None else None

    async def keep_open(self, scheduler: Scheduler, source: Source) -> None:
        """Enter a scheduler that stays open until `close`."""
        self._begin(scheduler)
        self._source = source
        self._open = AsyncExitStack()
        self._open.enter_context(Watchdog(IN_FLIGHT))
        await self._open.enter_async_context(scheduler)

    async def close(self) -> None:
        """End what is in flight; its groups go back to the data source."""
        opened, self._open, self._source, self._scheduler = self._open, None, None, None
        if opened is not None:
            await opened.aclose()

    async def before_update(self) -> None:
        """The weights are about to change."""
        if self._scheduler is not None:
            await self._scheduler.before_update()

    async def weights_changed(self, version: int) -> None:
        """The engine samples by this version from now on."""
        self.version = version
        if self._scheduler is not None:
            self._scheduler.weights_changed(version)

    def hand_out(self, step: int, groups: Sequence[Any]) -> None:
        """These groups left for training in `step`, unless it is told already; those of two steps before have
        trained."""
        self._handed_out.setdefault(step, groups)
        for old in [other for other in self._handed_out if other < step - 1]:
            del self._handed_out[old]

    def unfinished(self, step: int) -> list[Any]:
        """The groups that are out and have not trained by the end of `step`, as they would go back."""
        waiting = [groups for other, groups in list(self._handed_out.items()) if other > step]
        running = self._scheduler.unfinished() if self._scheduler is not None else []
        return [group for groups in waiting for group in groups] + running

    def _begin(self, scheduler: Scheduler) -> None:
        if self._scheduler is not None:
            raise ConfigError(
                "two rollout steps run at once in one process", remedy="await the first before the second"
            )
        self._scheduler = scheduler
        if self.version is not None:
            scheduler.weights_changed(self.version)


SESSION = RolloutSession()
"""The session of this process."""

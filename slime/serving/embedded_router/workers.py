"""The workers of a router: who is there, who is healthy, how much each has in flight.

Invariant: a worker is listed once it has answered its health check, and until it is removed; requests go to
healthy ones only. All of it runs on one event loop. Knows nothing of policies or bodies.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from slime.config.router_section import RouterSettings

logger = logging.getLogger(__name__)
_STARTUP_POLL_SECONDS = 0.1


@dataclass(eq=False)
class Worker:
    """One engine.

    Attributes:
        load: requests in flight.
        streak: health checks in a row that contradict `is_healthy`.
    """

    url: str
    model_id: str | None = None
    id: str = field(default_factory=lambda: str(uuid.uuid4()))
    is_healthy: bool = True
    load: int = 0
    streak: int = 0

    def as_json(self) -> dict[str, Any]:
        """As GET /workers lists it."""
        return {
            "id": self.id,
            "url": self.url,
            "model_id": self.model_id,
            "priority": 50,
            "cost": 1.0,
            "worker_type": "regular",
            "is_healthy": self.is_healthy,
            "load": self.load,
            "connection_mode": "HTTP",
            "metadata": {},
        }


class Workers:
    """The registry, and the task that watches it."""

    def __init__(self, settings: RouterSettings, session: aiohttp.ClientSession) -> None:
        self._settings = settings
        self._session = session
        self._listed: dict[str, Worker] = {}
        self._starting: dict[str, asyncio.Task[None]] = {}
        self._watch: asyncio.Task[None] | None = None

    @property
    def listed(self) -> list[Worker]:
        """Those that have been healthy, in the order in which they came."""
        return list(self._listed.values())

    @property
    def healthy(self) -> list[Worker]:
        """Those that get requests."""
        return [worker for worker in self._listed.values() if worker.is_healthy]

    def start(self) -> None:
        """Begin to watch."""
        if not self._settings.disable_health_check:
            self._watch = asyncio.create_task(self._watch_all())

    async def stop(self) -> None:
        """End all tasks."""
        tasks = [*self._starting.values(), *([self._watch] if self._watch else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def add(self, url: str, model_id: str | None) -> Worker:
        """Take a worker in as soon as it is healthy; one that is there already stays as it is."""
        for worker in self._listed.values():
            if worker.url == url:
                return worker
        worker = Worker(url=url, model_id=model_id)
        task = asyncio.create_task(self._start(worker))
        self._starting[worker.id] = task
        task.add_done_callback(lambda _: self._starting.pop(worker.id, None))
        return worker

    def remove(self, worker_id: str) -> bool:
        """Let a worker go; its requests in flight go on. False where the id is not known."""
        task = self._starting.get(worker_id)
        if task is not None and task.cancel():  # one that has just ended is listed
            return True
        worker = self._listed.pop(worker_id, None)
        if worker is not None:
            logger.warning("%s was removed with %d requests in flight", worker.url, worker.load)
        return worker is not None

    def get(self, worker_id: str) -> Worker | None:
        """A listed worker by its id."""
        return self._listed.get(worker_id)

    async def lost_contact(self, worker: Worker) -> bool:
        """Look after a worker whose connection broke; True if it is dead.

        It is out at once then, if checks can bring it back.
        """
        if await self._answers(worker):
            return False
        if not self._settings.disable_health_check and worker.is_healthy:
            self._mark(worker, is_healthy=False)
        return True

    async def _start(self, worker: Worker) -> None:
        seconds = self._settings.worker_startup_timeout_secs
        try:
            async with asyncio.timeout(seconds):
                while not await self._answers(worker):
                    await asyncio.sleep(_STARTUP_POLL_SECONDS)
        except TimeoutError:
            logger.error("%s was not healthy within %g s and is no worker", worker.url, seconds)
            return
        if all(other.url != worker.url for other in self._listed.values()):
            self._listed[worker.id] = worker
            logger.warning("%s is a worker", worker.url)

    async def _watch_all(self) -> None:
        while True:
            await asyncio.sleep(self._settings.health_check_interval_secs)
            await asyncio.gather(*(self._check(worker) for worker in self.listed))

    async def _check(self, worker: Worker) -> None:
        if await self._answers(worker) == worker.is_healthy:
            worker.streak = 0
            return
        worker.streak += 1
        settings = self._settings
        needed = settings.health_failure_threshold if worker.is_healthy else settings.health_success_threshold
        if worker.streak >= needed:
            self._mark(worker, is_healthy=not worker.is_healthy)

    def _mark(self, worker: Worker, *, is_healthy: bool) -> None:
        worker.is_healthy, worker.streak = is_healthy, 0
        logger.warning("%s is %s", worker.url, "healthy again" if is_healthy else "unhealthy")

    async def _answers(self, worker: Worker) -> bool:
        limits = aiohttp.ClientTimeout(total=self._settings.health_check_timeout_secs)
        url = worker.url + self._settings.health_check_endpoint
        try:
            async with self._session.get(url, timeout=limits) as answer:
                return answer.status < 400
        except (aiohttp.ClientError, TimeoutError):
            return False

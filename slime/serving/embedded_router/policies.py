"""Which worker gets a request: round robin, the less loaded of two, or by the session's key.

Invariant: a policy chooses among the candidates that it is given and remembers nothing about them, so that
workers may come and go. Knows no HTTP.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from slime.utils.rendezvous import chosen


class Candidate(Protocol):
    """A worker as policies see it."""

    @property
    def url(self) -> str:
        """Its name, too."""
        ...

    @property
    def load(self) -> int:
        """Requests that it has in flight."""
        ...


Worker = TypeVar("Worker", bound=Candidate)


class Policy(Protocol):
    """One way of choosing."""

    def choose(self, workers: Sequence[Worker], key: str | None) -> Worker:
        """One of `workers`, of which there is at least one; `key` names the session, where one is named."""
        ...


@dataclass
class RoundRobin:
    """One after the other."""

    _given: int = field(default=0, init=False)

    def choose(self, workers: Sequence[Worker], key: str | None) -> Worker:
        """The next in the order in which they are listed."""
        self._given += 1
        return workers[(self._given - 1) % len(workers)]


@dataclass
class PowerOfTwo:
    """The less loaded of two that are drawn."""

    draw: random.Random = field(default_factory=random.Random)

    def choose(self, workers: Sequence[Worker], key: str | None) -> Worker:
        """The less loaded; of equals the one drawn first."""
        return min(self.draw.sample(workers, min(2, len(workers))), key=lambda worker: worker.load)


@dataclass
class ConsistentHashing:
    """A session's own worker, for as long as it is there."""

    _given: int = field(default=0, init=False)

    def choose(self, workers: Sequence[Worker], key: str | None) -> Worker:
        """By rendezvous hashing; without a key the least loaded, of equals one after the other."""
        if key is not None:
            own = chosen(key, [worker.url for worker in workers])
            return next(worker for worker in workers if worker.url == own)
        self._given += 1
        start = self._given % len(workers)
        return min([*workers[start:], *workers[:start]], key=lambda worker: worker.load)


_POLICIES: dict[str, Callable[[], Policy]] = {
    "round_robin": RoundRobin,
    "power_of_two": PowerOfTwo,
    "consistent_hashing": ConsistentHashing,
}


def policy_named(name: str) -> Policy:
    """A policy by its name on the command line."""
    return _POLICIES[name]()

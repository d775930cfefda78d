"""`Transport`: one way for weights into engines that stand still. `EngineSync` does all that ways have in
common.

Invariant: a call goes through the source's weights exactly once, whatever engines do, since it is a
collective call of all ranks of the trainer. Knows no way.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from slime.serving.weights.crew import Crew
from slime.serving.weights.outgoing import Outgoing
from slime.serving.weights.sync import UpdatePause, WeightSource


@dataclass
class Update:
    """One update on its way, for a transport.

    Attributes:
        version: of the policy.
        weights: what is sent, to go through once.
        crew: the engines.
        pause: what became of requests in flight.
        sizes: bytes of each tensor that the engines' checkpoint has, as sent; none where it was not asked.
        sent_bytes: of weights, told by the transport.
        metrics: of its own.
    """

    version: int
    weights: Iterator[Outgoing]
    crew: Crew
    pause: UpdatePause
    sizes: Sequence[int] = ()
    sent_bytes: int = 0
    metrics: dict[str, float] = field(default_factory=dict)

    def taken(self) -> Iterator[Outgoing]:
        """The weights, counted."""
        for item in self.weights:
            self.sent_bytes += item.nbytes
            yield item

    def naming(self, is_last: bool) -> dict[str, object]:
        """Fields of an update call: only the last bears the version, so that no part of it passes for all.

        The cache was flushed before, but for requests that continue in place: there the engine drops the
        prefixes that they do not use. SGLang cannot, and 0.5.15 ends itself where an update may not flush.
        """
        flush = is_last and self.pause == "in_place"
        flush = flush and all(engine.able.flushes_in_place for engine in self.crew.members)
        return {"flush_cache": flush} | ({"weight_version": str(self.version)} if is_last else {})


class Transport(Protocol):
    """A way for weights.

    Attributes:
        has_session: whether its calls stand between ``begin_weight_update`` and ``end_weight_update``.
        takes_weights: whether it goes through all weights, or has its own way to the source.
        request_fields: what ``/generate`` must say besides to be answered by what it moved.
    """

    has_session: bool
    takes_weights: bool

    @property
    def request_fields(self) -> Mapping[str, str]: ...

    def stage(self, update: Update) -> None:
        """What can be done while engines still generate."""
        ...

    def send(self, update: Update) -> None:
        """Give the weights to the engines, which are paused; one that fails leaves the crew."""
        ...

    def follow(self, source: WeightSource, version: int) -> None:
        """The collective calls of a rank that talks to no engine."""
        ...

    def forget(self) -> None:
        """The engines are others from now on."""
        ...

    def close(self) -> None:
        """Give up groups, files and memory."""
        ...


def drain(weights: Iterator[Any]) -> None:
    """Go to the end, for the other ranks' sake."""
    collections.deque(weights, maxlen=0)

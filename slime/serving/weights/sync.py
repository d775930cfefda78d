"""`WeightSync`: what every way of moving weights from a trainer to engines looks like.

Invariant: after `update` each engine of the pool has the whole version or is named in the report as failed;
none is left between two versions unsaid. Knows neither trainer nor transport.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

from slime.serving.endpoint import EngineEndpoint

if TYPE_CHECKING:
    import torch

UpdatePause: TypeAlias = Literal["abort", "in_place", "retract"]
"""What becomes of requests in flight: ended, continued with the cache they have, or computed anew."""


class WeightSource(Protocol):
    """Where the weights come from: a trainer, one rank of it."""

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Hugging Face name and whole tensor, always in the same order; a collective call of all ranks."""
        ...

    def present(self) -> AbstractContextManager[None]:
        """Within it `weights` can be gone through, also while the trainer sleeps."""
        ...


@dataclass(frozen=True, kw_only=True)
class UpdateReport:
    """What an update did.

    Attributes:
        metrics: ``perf/update_weights_*``: seconds, bytes, pause seconds, density of a delta.
        failed: reason by engine name; such an engine must leave the pool.
    """

    metrics: Mapping[str, float]
    failed: Mapping[str, str] = field(default_factory=dict)


class WeightSync(Protocol):
    """One way of moving weights."""

    def connect(self, endpoints: Sequence[EngineEndpoint]) -> None:
        """Use these engines from now on; called again whenever the pool changes."""
        ...

    def update(self, version: int, pause: UpdatePause, *, released: bool = False) -> UpdateReport:
        """Pause, move the weights of the moment as policy `version`, continue; all ranks call it.

        Args:
            released: the engines gave up memory before; they take it back.
        """
        ...

    def close(self) -> None:
        """Give up groups, files and shared memory."""
        ...

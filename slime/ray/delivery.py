"""`Delivery`: one transfer of weights from the trainer to some engines, as the driver orders it."""

from __future__ import annotations

from dataclasses import dataclass

from slime.serving.endpoint import EngineEndpoint, EngineKind
from slime.serving.weights.sync import UpdatePause


@dataclass(frozen=True, kw_only=True)
class Way:
    """How weights reach the engines of a pool; the same in a whole run.

    Attributes:
        pool: name of the pool.
        one_machine: engines and trainer share memory.
        aliases: engines compute with the trainer's own weights.
    """

    pool: str
    kind: EngineKind
    one_machine: bool
    aliases: bool


@dataclass(frozen=True, kw_only=True)
class TrainerSharing:
    """What the trainer shares with engines.

    Attributes:
        shares_memory: its weights live in a file that engines map.
        engine_dtype: what engines compute in.
        sleeps: it gives up its device whenever it does not compute.
    """

    shares_memory: bool
    engine_dtype: str
    sleeps: bool


@dataclass(frozen=True, kw_only=True)
class Delivery:
    """One transfer.

    Attributes:
        endpoints: the engines, of one pool.
        version: of the policy that the trainer has now.
        pause: what becomes of requests in flight.
        released: the engines gave up memory before, and take it back now.
    """

    way: Way
    endpoints: tuple[EngineEndpoint, ...]
    version: int
    pause: UpdatePause
    released: bool = False

"""`EngineEndpoint`: one engine as those see it who talk to it. Knows no processes and no protocol."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

EngineKind: TypeAlias = Literal["embedded", "sglang"]
WorkerType: TypeAlias = Literal["regular", "prefill", "decode", "encoder"]


@dataclass(frozen=True, kw_only=True)
class EngineEndpoint:
    """Where an engine is, and what it is.

    Attributes:
        name: unique in the run, e.g. ``default/regular-0``; what errors and metrics call it.
        url: base URL, without a slash at the end.
        model: name of the model that it serves, a key of the topology.
        world_size: ranks that hold its weights: tensor times pipeline parallel size.
        updates_weights: whether the trainer's weights go there.
        is_external: started by others: never restarted, stopped or offloaded by us.
        incarnation: which process of this name it is, from 0: one that replaces another shares no connection,
            group or weights with it, though its address may be the same.
    """

    name: str
    url: str
    kind: EngineKind
    model: str = "default"
    worker_type: WorkerType = "regular"
    world_size: int = 1
    updates_weights: bool = True
    is_external: bool = False
    incarnation: int = 0

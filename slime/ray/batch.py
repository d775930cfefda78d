"""`RolloutBatch`: what travels from the rollout manager to the trainer, through Ray's object store."""

from __future__ import annotations

from dataclasses import dataclass, field

from slime.train.batch import TrainSample


@dataclass(frozen=True)
class RolloutBatch:
    """Rows of one rollout step, and its metrics."""

    samples: list[TrainSample]
    metrics: dict[str, float] = field(default_factory=dict)

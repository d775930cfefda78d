"""What a policy was trained on, as one number that two runs can compare.

Invariant: two runs have equal `Trained` exactly if the same rows trained in the same steps: the digest chains
over the steps, and inside a step it does not depend on the order of the rows. Knows rows; knows no files.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, replace

from slime.train.batch import TrainSample


@dataclass(frozen=True, slots=True)
class Trained:
    """Everything that trained since the first step.

    Attributes:
        rollouts: how many, siblings counted once.
        samples: rows.
        digest: hexadecimal SHA-256 of all that the rows carry, chained step by step.
    """

    rollouts: int = 0
    samples: int = 0
    digest: str = ""

    def after(self, samples: Iterable[TrainSample]) -> Trained:
        """The same after one more rollout step on `samples`; rows that do not vote train nothing."""
        rows = [sample for sample in samples if sample.votes]
        step = hashlib.sha256(self.digest.encode())
        for digest in sorted(map(_digest, rows)):
            step.update(digest)
        rollouts = len({sample.rollout_id for sample in rows})
        return Trained(self.rollouts + rollouts, self.samples + len(rows), step.hexdigest())


def _digest(sample: TrainSample) -> bytes:
    """Of all fields but the number in the batch; `repr` of a number is exact."""
    return hashlib.sha256(repr(replace(sample, index=0)).encode()).digest()

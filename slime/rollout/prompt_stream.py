"""One data set as an endless stream of prompts, epoch after epoch, each shuffled by its own permutation.

Invariant: after `restore` the next prompts are those that would have followed `state`. A prompt has the same
id in every epoch and order. Knows nothing of groups or mixtures.
"""

from __future__ import annotations

from typing import NamedTuple

from slime.utils.data import Dataset
from slime.utils.types import Sample

PROMPT_ID = "prompt_id"
"""Metadata key under which a row may name its own id, in place of ``<data set>:<line>``."""
DATASET = "slime_dataset"
"""Metadata key of the data set's name, where there are several."""


class Prompt(NamedTuple):
    """A prompt, not to be changed, and its id; None where there is no data set."""

    id: str | None
    sample: Sample


class PromptStream:
    """Prompts of one data set.

    Args:
        name: unique among the data sets of the run; part of prompt ids and metrics.
        marks: write the name into the metadata of each prompt.
    """

    def __init__(self, name: str, dataset: Dataset, *, shuffled: bool, marks: bool) -> None:
        self.name = name
        self.dataset = dataset
        self.shuffled = shuffled
        self.epoch_id = 0
        self.offset = 0
        for sample in dataset.samples if marks else ():
            sample.metadata[DATASET] = name
        self._shuffle()

    def __len__(self) -> int:
        return len(self.dataset)

    @property
    def given(self) -> int:
        """Prompts given out so far."""
        return self.epoch_id * len(self) + self.offset

    def next(self) -> Prompt:
        """The next prompt; the data set is begun again as often as needed."""
        if self.offset >= len(self):
            self.epoch_id += 1
            self.offset = 0
            self._shuffle()
        self.offset += 1
        sample = self.dataset[self.offset - 1]
        own = sample.metadata.get(PROMPT_ID)
        return Prompt(f"{self.name}:{self.dataset.row(self.offset - 1) if own is None else own}", sample)

    def state(self) -> dict[str, int]:
        """Where the stream stands, as JSON."""
        return {"epoch_id": self.epoch_id, "offset": self.offset}

    def restore(self, state: dict[str, int]) -> None:
        """Go on from there."""
        self.epoch_id, self.offset = int(state["epoch_id"]), int(state["offset"])
        self._shuffle()

    def _shuffle(self) -> None:
        if self.shuffled:
            self.dataset.shuffle(self.epoch_id)

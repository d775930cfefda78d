"""The trained tokens of a batch as one flat line, [T], on which per-token arithmetic is done.

Invariant: rollouts stand by ascending id, their rows by ascending index, and only tokens with mask 1 of rows
that vote are on it; so the line is the same for any order of the rows and any cut of the rollouts.
Knows ids and lengths; knows no estimators.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from slime.errors import DataError
from slime.train.batch import TrainSample
from slime.train.rewards import rollout_rows

RowValues: TypeAlias = Mapping[int, Sequence[float] | torch.Tensor]
"""Values by sample index, one a response token."""


@dataclass(frozen=True, slots=True)
class TokenStream:
    """Where each trained token of the batch is.

    Attributes:
        rollouts: voting rows by rollout id, in the order of the line.
        lengths: [R] trained tokens of each rollout, zero included.
        mask: [N] which response tokens of those rows are on the line.
    """

    rollouts: Mapping[int, Sequence[TrainSample]]
    lengths: torch.Tensor
    mask: torch.Tensor

    @classmethod
    def of(cls, samples: Sequence[TrainSample]) -> TokenStream:
        """The line of these rows.

        Raises:
            DataError: a mask that does not fit its response, two rows with one index, or a rollout whose rows
                name different groups.
        """
        rollouts = rollout_rows(samples)
        rows = [sample for siblings in rollouts.values() for sample in siblings]
        _check_ids(rollouts)
        for sample in rows:
            _check_length(sample, "loss_mask", len(sample.loss_mask))
        lengths = [sum(sample.trained_tokens for sample in siblings) for siblings in rollouts.values()]
        mask = [flag for sample in rows for flag in sample.loss_mask]
        return cls(rollouts, torch.tensor(lengths, dtype=torch.long), torch.tensor(mask, dtype=torch.bool))

    @property
    def rows(self) -> list[TrainSample]:
        """Voting rows in the order of the line."""
        return [sample for siblings in self.rollouts.values() for sample in siblings]

    @property
    def rollout_of(self) -> torch.Tensor:
        """[T] rollout id of each token."""
        ids = torch.tensor(list(self.rollouts), dtype=torch.long)
        return ids.repeat_interleave(self.lengths)

    def gather(self, name: str, values: RowValues) -> torch.Tensor:
        """Values of the trained tokens [T], float64.

        Args:
            name: what they are, for errors.
            values: by sample index, one a response token; rows without trained tokens may be absent.

        Raises:
            DataError: values that are missing, of another length, or not finite; names rollout and sample.
        """
        parts = [self._row_values(sample, name, values.get(sample.index)) for sample in self.rows]
        return torch.cat(parts)[self.mask] if parts else torch.zeros(0, dtype=torch.float64)

    def spread(self, values: Mapping[int, float]) -> torch.Tensor:
        """One value a row, by sample index, at each of its trained tokens [T], float64."""
        rows = [sample for sample in self.rows if sample.trained_tokens]
        line = torch.tensor([values[sample.index] for sample in rows], dtype=torch.float64)
        return line.repeat_interleave(
            torch.tensor([sample.trained_tokens for sample in rows], dtype=torch.long)
        )

    def scatter(self, values: torch.Tensor) -> dict[int, torch.Tensor]:
        """Inverse of `gather`: by sample index [response_length], 0.0 on tokens that do not train."""
        line = values.new_zeros(len(self.mask))
        line[self.mask] = values
        rows = self.rows
        parts = torch.split(line, [sample.response_length for sample in rows])
        return {sample.index: part for sample, part in zip(rows, parts, strict=True)}

    def _row_values(
        self, sample: TrainSample, name: str, values: Sequence[float] | torch.Tensor | None
    ) -> torch.Tensor:
        if values is None:
            if sample.trained_tokens:
                raise DataError(
                    f"{name} are missing; its response has {sample.response_length} tokens",
                    place=_place(sample),
                )
            return torch.zeros(sample.response_length, dtype=torch.float64)
        _check_length(sample, name, len(values))
        row = torch.as_tensor(values, dtype=torch.float64).detach().cpu()
        trained = torch.tensor(sample.loss_mask, dtype=torch.bool)
        if not bool(row[trained].isfinite().all()):
            raise DataError(
                f"{name} of its {sample.trained_tokens} trained tokens are not all finite",
                place=_place(sample),
            )
        return row


def _check_ids(rollouts: Mapping[int, Sequence[TrainSample]]) -> None:
    seen: set[int] = set()
    for siblings in rollouts.values():
        for sample in siblings:
            if sample.index in seen:
                raise DataError("two samples of the batch carry this index", place=_place(sample))
            seen.add(sample.index)
            if sample.group_index != siblings[0].group_index:
                raise DataError(
                    f"group {sample.group_index}, but sample {siblings[0].index} of the rollout names group "
                    f"{siblings[0].group_index}",
                    place=_place(sample),
                    remedy="copy group_index and rollout_id to every sample that a generate hook makes",
                )


def _check_length(sample: TrainSample, name: str, length: int) -> None:
    if length != sample.response_length:
        raise DataError(
            f"{name} has length {length}, the response has {sample.response_length} tokens",
            place=_place(sample),
        )


def _place(sample: TrainSample) -> str:
    return f"rollout {sample.rollout_id}, sample {sample.index}"

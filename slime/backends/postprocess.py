"""The user's last word on a rollout step, ``--rollout-data-postprocess-path``, and what it changed.

Invariant: advantages, returns and loss masks can change, and nothing else; a mask only from 1 to 0, since
what the policy did not sample does not train (law 1). What changed is read back before rows are weighed, so
that denominators are those of the new masks, whatever the packing (law 3). Knows rows; knows no trainer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from slime.backends.hooks import rows_of_answer
from slime.backends.rollout_data import place_of, rollout_data, trained_rows
from slime.train.advantages import Estimator, TokenAdvantages, TokenInputs
from slime.train.batch import TrainSample
from slime.train.stream import TokenStream
from slime.utils.user_function import UserFunction

CHANGEABLE = ("advantages", "returns", "loss_masks")
_REMEDY = f"change {', '.join(CHANGEABLE)} of rollout_data in place"


@dataclass(frozen=True, slots=True)
class Postprocess:
    """The hook of a run, for one rollout step: it is called ``(args, rollout_id, rollout_data)``."""

    hook: UserFunction
    args: Any
    rollout_id: int

    def __call__(
        self,
        samples: Sequence[TrainSample],
        estimator: Estimator,
        inputs: TokenInputs,
        found: TokenAdvantages,
    ) -> tuple[list[TrainSample], TokenAdvantages]:
        """Call it with `rollout_data`, to which advantages and returns are added, and read it back.

        Returns:
            The rows with its masks, and `found` with its advantages and returns.

        Raises:
            HookError: it raised, returned something, changed what cannot change, or gave lists of another
                shape, not finite, or masks that are not 0 or 1; names hook, sample and lengths.
        """
        rows = trained_rows(samples)
        data = rollout_data(rows, samples, estimator, inputs)
        data["advantages"] = [found.advantages[row.index].clone() for row in rows]
        if found.returns is not None:
            data["returns"] = [found.returns[row.index].clone() for row in rows]
        before = {name: _copied(values) for name, values in data.items() if name not in CHANGEABLE}
        answer = self.hook(self.args, self.rollout_id, data)
        if answer is not None and answer is not data:
            raise self.hook.broke(f"returned {type(answer).__name__}, which nobody reads", _REMEDY)
        self._check_unchanged(before, data, rows, has_returns=found.returns is not None)
        changed = self._masked(rows, data["loss_masks"])
        kept = [changed.get(sample.index, sample) for sample in samples]
        stream = TokenStream.of(kept)
        returns = None if found.returns is None else self._line(stream, "returns", data, rows)
        advantages = self._line(stream, "advantages", data, rows)
        return kept, replace(
            found,
            advantages=stream.scatter(advantages),
            returns=None if returns is None else stream.scatter(returns),
        )

    def _check_unchanged(
        self,
        before: Mapping[str, list[Any]],
        data: Mapping[str, Any],
        rows: Sequence[TrainSample],
        *,
        has_returns: bool,
    ) -> None:
        expected = {*before, "advantages", "loss_masks", *(["returns"] if has_returns else [])}
        for what, names in (("removed", expected - set(data)), ("added", set(data) - expected)):
            if names:
                listed = ", ".join(sorted(map(str, names)))
                raise self.hook.broke(f"{what} {listed}, and training does not read that", _REMEDY)
        for name, values in before.items():
            now = data[name]
            if not isinstance(now, list) or len(now) != len(rows):
                found = len(now) if isinstance(now, list) else type(now).__name__
                raise self.hook.broke(f"changed {name} from a list of {len(rows)} rows to {found}", _REMEDY)
            for row, value, was in zip(rows, now, values, strict=True):
                if not _same(value, was):
                    raise self.hook.broke(
                        f"changed {name} of {place_of(row)} ({row.response_length} tokens), which must stay",
                        _REMEDY,
                    )

    def _masked(self, rows: Sequence[TrainSample], answer: Any) -> dict[int, TrainSample]:
        """By index: the rows whose masks changed."""
        places, lengths = [place_of(row) for row in rows], [row.response_length for row in rows]
        masks = rows_of_answer(self.hook, "loss_masks", answer, places, lengths)
        changed: dict[int, TrainSample] = {}
        for row, mask in zip(rows, masks, strict=True):
            kept = self._mask(row, mask.tolist())
            if kept != row.loss_mask:
                changed[row.index] = replace(row, loss_mask=kept)
        if not any(changed.get(row.index, row).trained_tokens for row in rows):
            raise self.hook.broke(f"left no token to train on: the loss_masks of all {len(rows)} rows are 0")
        return changed

    def _mask(self, row: TrainSample, values: Sequence[float]) -> tuple[int, ...]:
        """The row's mask, checked."""
        for token, (value, was) in enumerate(zip(values, row.loss_mask, strict=True)):
            if value not in (0, was):
                what = f"loss_masks of {place_of(row)} is {value:g} at token {token} of {row.response_length}"
                if value == 1:
                    raise self.hook.broke(f"{what}, which was 0: the policy did not sample it", _LOWER)
                raise self.hook.broke(f"{what}, expected 0 or 1", _LOWER)
        return tuple(map(int, values))

    def _line(
        self, stream: TokenStream, name: str, data: Mapping[str, Any], rows: Sequence[TrainSample]
    ) -> torch.Tensor:
        places, lengths = [place_of(row) for row in rows], [row.response_length for row in rows]
        answer = rows_of_answer(self.hook, name, data[name], places, lengths)
        return stream.gather(name, {row.index: values for row, values in zip(rows, answer, strict=True)})


_LOWER = "set masks from 1 to 0, never from 0 to 1"


def _copied(values: Sequence[Any]) -> list[Any]:
    return [value.clone() if isinstance(value, torch.Tensor) else value for value in values]


def _same(now: Any, before: Any) -> bool:
    if not isinstance(before, torch.Tensor):
        return bool(now == before)
    if not isinstance(now, torch.Tensor) or now.shape != before.shape:
        return False
    return torch.allclose(now.double(), before.double(), rtol=0, atol=0, equal_nan=True)

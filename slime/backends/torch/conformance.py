"""Law 3 as a check: the same rollouts in other rows, order and micro-batches give the same gradient.

Invariant: weights never move during a check, so every run starts from the same model. What is compared is
the gradient and the loss of every optimizer step, of the arithmetic that the caller gives, hooks included.
Knows the torch trainer and critic, and rows; knows no flags.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch

from slime.backends.base import Critic, StepRow, Trainer, ValueRow
from slime.backends.torch.critic import TorchCritic
from slime.backends.torch.trainer import TorchTrainer
from slime.backends.update import RolloutUpdate
from slime.errors import ConfigError
from slime.train.batch import TrainSample
from slime.train.packing import Packing
from slime.train.synthetic import Pieces, cut_rollouts

TOLERANCE = 1e-5
_LEAST_LOSS = 0.1
Train: TypeAlias = Callable[[Trainer, Critic | None, Sequence[TrainSample]], RolloutUpdate]
"""The arithmetic under check: all optimizer steps of these rows, on a trainer and maybe a critic."""
Gradient: TypeAlias = Mapping[str, torch.Tensor]
_Model: TypeAlias = TorchTrainer | TorchCritic
_Row: TypeAlias = StepRow | ValueRow
_ROWS = Packing(rows_per_batch=1, trees="off")


@dataclass(frozen=True, slots=True, kw_only=True)
class Variation:
    """Another form of the same rollouts.

    Attributes:
        name: what is different.
        pieces: rows of each rollout; see `cut_rollouts`.
        carries_history: see `cut_rollouts`.
        shuffled: rows in random order.
        packing: how they are packed.
    """

    name: str
    pieces: Pieces = 1
    carries_history: bool = False
    shuffled: bool = False
    packing: Packing = _ROWS

    @property
    def cuts(self) -> bool:
        """Whether a rollout has another number of rows."""
        return self.pieces != 1

    @property
    def is_repetition(self) -> bool:
        """Whether nothing is different."""
        return not self.cuts and not self.shuffled and self.packing == _ROWS


_TREES = Packing(max_tokens=10_000, trees="on")
VARIATIONS = (
    Variation(name="the same rows again"),
    Variation(name="rows in another order", shuffled=True),
    Variation(name="micro-batches of 2 rows", packing=Packing(rows_per_batch=2, trees="off")),
    Variation(name="all rows in one micro-batch", packing=Packing(max_tokens=10_000, trees="off")),
    Variation(name="common prefixes computed once", packing=_TREES),
    Variation(name="rollouts cut in 2 samples", pieces=2),
    Variation(name="rollouts cut in 5 samples", pieces=5, shuffled=True, packing=Packing(max_tokens=60)),
    Variation(name="rollouts cut unevenly", pieces="uneven", shuffled=True, packing=_TREES),
    Variation(
        name="rollouts cut unevenly, earlier turns carried along",
        pieces="uneven",
        carries_history=True,
        packing=Packing(rows_per_batch=2, trees="on"),
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Outcome of one variation.

    Attributes:
        gap: largest difference of a step's gradient or loss, relative to its largest entry.
        verdict: ``by definition`` is a difference that the declared aggregation makes.
        offender: the first sample whose part of the gradient is another, and the first value that made it so.
        field: name of that value in `StepRow` or `ValueRow`; None where only the loss itself differs.
    """

    variation: Variation
    gap: float
    verdict: Literal["pass", "fail", "by definition"]
    offender: str | None = None
    field: str | None = None


def check_invariance(
    trainer: TorchTrainer,
    train: Train,
    samples: Sequence[TrainSample],
    *,
    critic: TorchCritic | None = None,
    variations: Sequence[Variation] = VARIATIONS,
    shares_reward: bool = False,
    depends_on_cut: bool = False,
    seed: int = 0,
) -> Iterator[Finding]:
    """Train on every variation of `samples` and compare with the rows one by one in their order.

    Args:
        trainer, critic: their learning rate is 0, and their gradients are not clipped.
        samples: one row a rollout.
        shares_reward: rows carry parts of the reward (``--sibling-reward sum``).
        depends_on_cut: the declared arithmetic depends on the cut by definition (``sample`` aggregation).

    Raises:
        ConfigError: no step has a gradient, so that nothing could be compared.
    """
    models = (trainer,) if critic is None else (trainer, critic)
    expected = _run(models, train, samples, _ROWS)
    if not any(_scale(step.gradient) for step in expected):
        raise ConfigError(
            "the gradient of every step is zero, so there is nothing to compare",
            place="arithmetic",
            remedy="check that rewards or hooks give advantages other than 0",
        )
    for variation in variations:
        rng = random.Random(seed)
        rows = cut_rollouts(
            samples,
            variation.pieces,
            rng,
            carries_history=variation.carries_history,
            shares_reward=shares_reward,
        )
        if variation.shuffled:
            rng.shuffle(rows)
        found = _run(models, train, rows, variation.packing)
        gap = _worst(gap for pair in zip(expected, found, strict=True) for gap in _step_gaps(*pair))
        if gap <= TOLERANCE:
            yield Finding(variation=variation, gap=gap, verdict="pass")
        elif variation.cuts and depends_on_cut:
            yield Finding(variation=variation, gap=gap, verdict="by definition")
        else:
            offender, field = _first_offender(expected, found, variation.packing)
            yield Finding(variation=variation, gap=gap, verdict="fail", offender=offender, field=field)


@dataclass(frozen=True, slots=True)
class _Step:
    """One optimizer step: the model, the rows that it was given, and what came of them."""

    model: _Model
    rows: Sequence[_Row]
    gradient: Gradient
    loss: float


class _Recorder:
    """A trainer or critic whose steps are kept."""

    def __init__(self, model: _Model, steps: list[_Step]) -> None:
        self._model = model
        self._steps = steps

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def step(self, rows: Sequence[Any]) -> dict[str, float]:
        """A step of the model, recorded."""
        metrics = self._model.step(rows)
        loss = metrics["loss"] if "loss" in metrics else metrics["value_loss"]
        self._steps.append(_Step(self._model, rows, _gradient(self._model), loss))
        return metrics

    def sleep(self) -> None:
        """Nothing: the next run is at once, and giving memory back takes longer than a run."""


def _run(
    models: Sequence[_Model], train: Train, rows: Sequence[TrainSample], packing: Packing
) -> list[_Step]:
    steps: list[_Step] = []
    for model in models:
        model.pack_as(packing)
    actor, *critics = (_Recorder(model, steps) for model in models)
    train(actor, critics[0] if critics else None, rows)
    return steps


def _gradient(model: _Model) -> Gradient:
    return {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        for name, parameter in model.named_parameters()
    }


def _scale(gradient: Gradient) -> float:
    return _worst(float(g.abs().max()) for g in gradient.values())


def _distance(left: Gradient, right: Gradient) -> float:
    return _worst(float((left[name] - right[name]).abs().max()) for name in left)


def _step_gaps(expected: _Step, found: _Step) -> tuple[float, float]:
    """Largest differences of the gradient (absolute where it is 0) and of the loss."""
    gradient = _distance(found.gradient, expected.gradient) / (_scale(expected.gradient) or 1.0)
    return gradient, abs(found.loss - expected.loss) / max(abs(expected.loss), _LEAST_LOSS)


def _worst(values: Iterable[float]) -> float:
    """The largest; not a number is larger than any."""
    return max(values, key=lambda value: (math.isnan(value), value))


def _first_offender(
    expected: Sequence[_Step], found: Sequence[_Step], packing: Packing
) -> tuple[str, str | None]:
    """The first rollout whose part of the gradient is another; its sample and value, in words."""
    for whole, cut in zip(expected, found, strict=True):
        for rollout in sorted({row.sample.rollout_id for row in whole.rows}):
            before, after = (_of_rollout(step.rows, rollout) for step in (whole, cut))
            left, right = _part_of(whole.model, before, _ROWS), _part_of(cut.model, after, packing)
            if not _distance(left, right) <= TOLERANCE * _scale(whole.gradient):
                return _first_difference(before, after)
    return "no rollout alone: the loss depends on which rollouts are computed together", None


def _of_rollout(rows: Sequence[_Row], rollout: int) -> list[_Row]:
    return sorted((row for row in rows if row.sample.rollout_id == rollout), key=lambda row: row.sample.index)


def _part_of(model: _Model, rows: Sequence[Any], packing: Packing) -> Gradient:
    model.pack_as(packing)
    model.step(rows)
    return _gradient(model)


def _first_difference(before: Sequence[_Row], after: Sequence[_Row]) -> tuple[str, str | None]:
    """The first value of a trained token that differs between two forms of a rollout."""
    place = f"rollout {before[0].sample.rollout_id}, sample"
    for field in dataclasses.fields(before[0]):
        if field.name in ("sample", "stale"):
            continue
        pairs = itertools.zip_longest(_line(before, field.name), _line(after, field.name))
        for token, (old, new) in enumerate(pairs):
            if old is None or new is None or not _close(old[1], new[1]):
                sample = (new or old or (0, None))[0]
                was, became = (None if value is None else value[1] for value in (old, new))
                words = f"{field.name} of the rollout's trained token {token} was {was}, became {became}"
                return f"{place} {sample}: {words}", field.name
    return f"{place} {after[0].sample.index}: its loss, from equal values", None


def _line(rows: Sequence[_Row], name: str) -> Iterator[tuple[int, float | None]]:
    """Sample index and value of each trained token."""
    for row in rows:
        value = getattr(row, name)
        values = value if isinstance(value, tuple) else (value,) * row.sample.response_length
        for flag, each in zip(row.sample.loss_mask, values, strict=True):
            if flag:
                yield row.sample.index, each


def _close(old: float | None, new: float | None) -> bool:
    if old is None or new is None:
        return old is new
    return abs(old - new) <= TOLERANCE * max(abs(old), abs(new), _LEAST_LOSS)

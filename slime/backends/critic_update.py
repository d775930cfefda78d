"""The critic's part of an update: values before the first step, then steps towards the returns.

Invariant: values and returns are settled before any weight moves, and a critic's step has the rollouts and
the weights of the actor's. Knows the `Critic` interface; knows no backend and no policy.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from slime.backends.base import Critic, ValueRow
from slime.errors import HookError
from slime.train.advantages import TokenAdvantages
from slime.train.batch import TrainSample
from slime.train.stream import TokenStream
from slime.train.value_loss import explained_variance

RowFloats = Mapping[int, tuple[float, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticTraining:
    """How a critic is trained on a rollout step.

    Attributes:
        epochs: passes over all optimizer steps of the rollout step.
        alone: the actor is not trained: the critic warms up.
    """

    critic: Critic
    epochs: int = 1
    alone: bool = False


def values_before(critic: Critic, samples: Sequence[TrainSample]) -> RowFloats:
    """Values by sample index, one a response token, of all rows that train."""
    trained = [sample for sample in samples if sample.trained_tokens]
    return {sample.index: tuple(row) for sample, row in zip(trained, critic.values(trained), strict=True)}


def train_critic(
    training: CriticTraining,
    steps: Sequence[Sequence[TrainSample]],
    weights: Sequence[Mapping[int, float]],
    *,
    values: RowFloats,
    found: TokenAdvantages,
) -> tuple[list[dict[str, float]], dict[str, float]]:
    """All steps of the critic; metrics of each, and of the rollout step.

    Its gradients are given up before the actor needs the room.

    Args:
        weights: by sample index, for each of `steps`.
        values: the critic's before the first step.

    Raises:
        HookError: the advantages are of the user's function, which set no returns.
    """
    returns = _needed_returns(found)
    targets = {index: tuple(row.tolist()) for index, row in returns.items()}
    metrics = []
    for _, (step, weight) in itertools.product(range(training.epochs), zip(steps, weights, strict=True)):
        rows = [
            ValueRow(
                sample=sample,
                returns=targets[sample.index],
                old_values=values[sample.index],
                weight=weight[sample.index],
            )
            for sample in step
            if sample.trained_tokens
        ]
        metrics.append(training.critic.step(rows))
    training.critic.sleep()
    return metrics, value_metrics(itertools.chain.from_iterable(steps), values, returns)


def value_metrics(
    samples: Iterable[TrainSample], values: RowFloats, returns: Mapping[int, torch.Tensor]
) -> dict[str, float]:
    """Means of old values and of returns over all trained tokens, and how much of them the values explain."""
    stream = TokenStream.of([*samples])
    old, targets = stream.gather("values", values), stream.gather("returns", returns)
    return {
        "values": float(old.mean()),
        "returns": float(targets.mean()),
        "explained_variance": explained_variance(old, targets),
    }


def _needed_returns(found: TokenAdvantages) -> Mapping[int, torch.Tensor]:
    """The value targets.

    Raises:
        HookError: the advantages are of the user's function, which set none.
    """
    if found.returns is None:
        raise HookError(
            'did not set rollout_data["returns"], which the critic learns from',
            place="--custom-advantage-function-path",
            remedy="set them, or choose an estimator without a critic",
        )
    return found.returns

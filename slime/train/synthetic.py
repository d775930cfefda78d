"""Synthetic rollouts, and the ways in which an agent layer may cut them into rows.

Invariant: all cuts of a rollout train the same tokens behind the same histories, each once. Torch-free;
knows rows only.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from slime.train.batch import TrainSample

Pieces = int | Literal["uneven"]
_UNEVEN = 4
_PROMPT, _HEAD = 7, 4


def synthetic_rollouts(
    seed: int = 0, *, groups: int = 3, size: int = 4, vocabulary: int = 64
) -> list[TrainSample]:
    """One row a rollout: turns with tool tokens between them, unequal rewards, uneven groups.

    All prompts begin alike. One rollout of three was sampled by an older policy, so that its ratio is not 1;
    the last one failed, and has no vote. Log-probs of engine and teacher are near those of a uniform
    distribution.
    """
    rng = random.Random(seed)
    uniform, teacher = random.Random(seed + 1), random.Random(seed + 2)
    head = [rng.randrange(vocabulary) for _ in range(_HEAD)]
    samples: list[TrainSample] = []
    for group in range(groups):
        prompt = head + [rng.randrange(vocabulary) for _ in range(_PROMPT - _HEAD)]
        for _ in range(size - group % 2):
            mask = [m for _ in range(3) for m in [1] * rng.randint(1, 4) + [0] * rng.randint(1, 3)]
            index = len(samples)
            samples.append(
                TrainSample(
                    index=index,
                    rollout_id=index,
                    group_index=group,
                    tokens=(*prompt, *(rng.randrange(vocabulary) for _ in mask)),
                    response_length=len(mask),
                    loss_mask=tuple(mask),
                    rollout_log_probs=tuple(-4.0 + uniform.uniform(-0.5, 0.5) for _ in mask),
                    reward=round(rng.uniform(-1, 1), 3),
                    policy_version=int(index % 3 > 0),
                    teacher_log_probs=tuple(-4.0 + teacher.uniform(-0.5, 0.5) for _ in mask),
                )
            )
    samples[-1] = replace(samples[-1], votes=False, reward=float("nan"))
    return samples


def cut_rollouts(
    samples: Sequence[TrainSample],
    pieces: Pieces,
    rng: random.Random,
    *,
    carries_history: bool = False,
    shares_reward: bool = False,
) -> list[TrainSample]:
    """Every rollout as several rows, each with the whole history before its part.

    Args:
        samples: one row a rollout.
        pieces: rows of equal length of each rollout, or ``uneven``: up to four, cut at random.
        carries_history: the response of a row begins at the rollout's first response token, with mask 0 on
            what an earlier row trains; otherwise it is the new part alone.
        shares_reward: a rollout's rows carry equal parts of its reward instead of the whole.
    """
    rows: list[TrainSample] = []
    for sample in samples:
        spans = [span for span in _spans(sample, pieces, rng) if sample.votes and any(_part(sample, span))]
        share = len(spans) if shares_reward else 1
        cut = [_row(sample, span, carries_history) for span in spans] or [sample]
        whole = sample.reward
        reward = whole / share if share > 1 and isinstance(whole, int | float) else whole
        rows += [replace(row, index=100 * sample.index + k, reward=reward) for k, row in enumerate(cut)]
    return rows


def _spans(sample: TrainSample, pieces: Pieces, rng: random.Random) -> list[tuple[int, int]]:
    length = sample.response_length
    if pieces == "uneven":
        inner = rng.sample(range(1, length), min(rng.randint(1, _UNEVEN - 1), length - 1))
        bounds = [0, *sorted(inner), length]
    else:
        bounds = [round(k * length / pieces) for k in range(pieces + 1)]
    return [(start, stop) for start, stop in itertools.pairwise(bounds) if start < stop]


def _part(sample: TrainSample, span: tuple[int, int]) -> tuple[int, ...]:
    return sample.loss_mask[span[0] : span[1]]


def _row(sample: TrainSample, span: tuple[int, int], carries_history: bool) -> TrainSample:
    start, stop = span
    begin = 0 if carries_history else start

    def part(values: tuple[float, ...] | None) -> tuple[float, ...] | None:
        return None if values is None else (0.0,) * (start - begin) + values[start:stop]

    return replace(
        sample,
        tokens=sample.tokens[: sample.prompt_length + stop],
        response_length=stop - begin,
        loss_mask=(0,) * (start - begin) + _part(sample, span),
        rollout_log_probs=part(sample.rollout_log_probs),
        teacher_log_probs=part(sample.teacher_log_probs),
    )

"""Scores of evaluated rollouts and their metrics, for evaluations in a run and offline alike.

Invariant: a rollout counts once, however many samples it has, and is found by its id; failed rollouts are in
no mean. Pure functions.
"""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slime.rollout.groups import flatten, rollouts_of
from slime.rollout.metrics import statistics_of, trained_tokens
from slime.rollout.passing import has_passed, pass_rates
from slime.rollout.rewarding import INVALID_KEY
from slime.utils.types import Sample


def eval_metrics(args: Any, data: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """``eval/`` metrics of the result of an evaluation.

    Args:
        args: reads pass_threshold.
        data: data set -> ``{"rewards", "truncated", "samples"}``. Rewards and truncated are one a rollout, or
            one a sample; ``rollout_ids`` beside them, where given, names the rollout of each. Siblings count
            once. ``pass_threshold`` is the data set's own.
    """
    values: dict[str, float] = {}
    for name, entry in data.items():
        threshold = entry.get("pass_threshold")
        default = getattr(args, "pass_threshold", None)
        values |= _eval_metrics(f"eval/{name}", entry, default if threshold is None else threshold)
    return values


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """What counts of one evaluated rollout.

    Attributes:
        response_length: sampled tokens of all siblings; None where they are not known.
        invalid: the response held no answer to judge, which its reward scores.
    """

    group_index: int | None
    reward: float
    truncated: bool
    response_length: int | None
    invalid: bool = False


def score_metrics(prefix: str, scores: Sequence[Score], threshold: float | None) -> dict[str, float]:
    """Mean reward, truncation, lengths, counts and pass@k of a data set; pass@k where passing is defined.

    Args:
        threshold: reward that passes; without one, pass@k is told if every reward is 0 or 1.
    """
    if not scores:
        return {}
    values = {
        prefix: statistics.fmean(score.reward for score in scores),
        f"{prefix}-truncated_ratio": statistics.fmean(score.truncated for score in scores),
        f"{prefix}/rollouts": float(len(scores)),
        f"{prefix}/invalid": float(sum(score.invalid for score in scores)),
    }
    lengths = [score.response_length for score in scores if score.response_length is not None]
    if lengths:
        values |= {f"{prefix}/response_len/{k}": v for k, v in statistics_of(lengths).items()}
    groups: dict[int, list[bool | None]] = defaultdict(list)
    for score in scores:
        if score.group_index is not None:
            groups[score.group_index].append(has_passed(score.reward, threshold))
    known = [[passed for passed in group if passed is not None] for group in groups.values()]
    if sum(map(len, known)) == len(scores):
        values |= {f"{prefix}-pass@{k}": rate for k, rate in pass_rates(known).items()}
    return values


def _eval_metrics(prefix: str, entry: Mapping[str, Any], threshold: float | None) -> dict[str, float]:
    rewards = [float(reward) for reward in entry["rewards"]]
    truncated = [bool(flag) for flag in entry.get("truncated") or []]
    samples = list(flatten(entry.get("samples") or []))
    ids = _ids_of(entry, samples, len(rewards))
    if not rewards or ids is None:
        return _plain_metrics(prefix, rewards, truncated)
    siblings = {_key(s): rollout for rollout in rollouts_of(samples) for s in rollout}
    by_rollout: dict[Any, list[tuple[float, bool]]] = defaultdict(list)
    for key, reward, cut in itertools.zip_longest(ids, rewards, truncated, fillvalue=False):
        by_rollout[key].append((float(reward), bool(cut)))
    scores = []
    for key, held in by_rollout.items():
        rows = siblings.get(key, [])
        scores.append(
            Score(
                group_index=rows[0].group_index if rows else None,
                reward=statistics.fmean(reward for reward, _ in held),
                truncated=held[-1][1],
                response_length=trained_tokens(rows) if rows else None,
                invalid=any(INVALID_KEY in row.metadata for row in rows),
            )
        )
    values = score_metrics(prefix, scores, threshold)
    return values if truncated else {k: v for k, v in values.items() if k != f"{prefix}-truncated_ratio"}


def _ids_of(entry: Mapping[str, Any], samples: Sequence[Sample], count: int) -> list[Any] | None:
    """The rollout of each reward; None where it cannot be told."""
    if entry.get("rollout_ids") is not None:
        ids = [("id", rollout_id) for rollout_id in entry["rollout_ids"]]
        return ids if len(ids) == count else None
    if len(samples) == count:
        return [_key(sample) for sample in samples]
    rollouts = rollouts_of(samples)
    return [_key(rollout[0]) for rollout in rollouts] if len(rollouts) == count else None


def _key(sample: Sample) -> tuple[str, int]:
    return ("id", sample.rollout_id) if sample.rollout_id is not None else ("object", id(sample))


def _plain_metrics(prefix: str, rewards: Sequence[float], truncated: Sequence[bool]) -> dict[str, float]:
    """Of other eval functions, which may give rewards alone."""
    values = {prefix: statistics.fmean(rewards)} if rewards else {}
    return values | ({f"{prefix}-truncated_ratio": statistics.fmean(truncated)} if truncated else {})

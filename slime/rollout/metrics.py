"""Metrics of rollout steps, under the names that users of slime know.

Invariant: a rollout counts once, however many samples it has; failed and aborted rollouts are in no mean.
Pure functions of samples.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from slime.rollout.convert import policy_version
from slime.rollout.groups import flatten, rollouts_of
from slime.rollout.outcome import Rollout, rollout_reward
from slime.rollout.prompt_stream import DATASET
from slime.utils.types import Sample

_VOID = (Sample.Status.FAILED, Sample.Status.ABORTED)
Siblings = Sequence[Sample]


def rollout_metrics(args: Any, samples: Any, seconds: float) -> dict[str, float]:
    """``rollout/`` and ``perf/`` metrics of one step.

    Args:
        args: reads reward_key, rollout_num_gpus, sglang_speculative_algorithm.
        samples: the step's samples, flat or in groups.
        seconds: how long the step took.
    """
    rollouts = [r for r in rollouts_of(flatten(samples)) if not any(s.status in _VOID for s in r)]
    if not rollouts:
        return {"perf/rollout_time": seconds}
    lengths = [trained_tokens(siblings) for siblings in rollouts]
    values = {f"rollout/response_len/{name}": value for name, value in statistics_of(lengths).items()}
    values["rollout/truncated_ratio"] = statistics.fmean(map(_truncated, rollouts))
    rewards = _rewards(args, rollouts)
    if rewards:
        values["rollout/raw_reward"] = statistics.fmean(_raw(s, reward) for s, reward in rewards)
        values |= _by_data_set(rewards)
    values |= (
        _policy_age(rollouts) | _zero_std(rewards) | _cache_metrics(rollouts) | _speculation(args, rollouts)
    )
    values |= _agent_metrics(rollouts)
    return values | _perf_metrics(args, rollouts, lengths, seconds)


def _agent_metrics(rollouts: Sequence[Siblings]) -> dict[str, float]:
    """``agent/`` metrics of the rollouts that an agent session recorded (`slime.agent.linearise.Tally`).

    Turns, and sampled tokens by what became of them, a rollout; `trained_share` is of all sampled tokens.
    """
    tallies = [t for s in rollouts if (t := s[0].metadata.get("trajectory")) is not None]
    if not tallies:
        return {}
    values = {f"agent/{name}": statistics.fmean(t[name] for t in tallies) for name in tallies[0]}
    values["agent/samples"] = statistics.fmean(
        len(siblings) for siblings in rollouts if "trajectory" in siblings[0].metadata
    )
    sampled = sum(t["tokens"] for t in tallies)
    values["agent/trained_share"] = sum(t["tokens_trained"] for t in tallies) / sampled if sampled else 0.0
    return values


def drop_metrics(drops: Counter[str]) -> dict[str, float]:
    """Dropped groups by reason."""
    return {f"rollout/dynamic_filter/drop_{reason}": float(count) for reason, count in drops.items()}


def timing_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Seconds that the accepted rollouts spent in each phase: waiting for a slot, generating, in reward."""
    values: dict[str, float] = {}
    for phase in ("queued", "generate", "reward"):
        seconds = [getattr(rollout.timings, phase) for rollout in rollouts]
        values[f"perf/rollout_phase/{phase}/mean"] = statistics.fmean(seconds)
        values[f"perf/rollout_phase/{phase}/max"] = max(seconds)
    return values


def statistics_of(values: Sequence[float]) -> dict[str, float]:
    """Mean, median, max and min."""
    return {
        "mean": statistics.fmean(values),
        "median": statistics.median(values),
        "max": max(values),
        "min": min(values),
    }


def _rewards(args: Any, rollouts: Iterable[Siblings]) -> list[tuple[Siblings, float]]:
    return [(r, rollout_reward(r, args)) for r in rollouts if all(s.reward is not None for s in r)]


def _raw(siblings: Siblings, reward: float) -> float:
    """The reward before shaping, where a hook recorded it."""
    return float(siblings[-1].metadata.get("raw_reward", reward))


def _by_data_set(rewards: Iterable[tuple[Siblings, float]]) -> dict[str, float]:
    """Mean reward and number of rollouts of each data set of a mixture."""
    sets: dict[str, list[float]] = defaultdict(list)
    for siblings, reward in rewards:
        name = siblings[0].metadata.get(DATASET)
        if name is not None:
            sets[name].append(_raw(siblings, reward))
    values = {f"rollout/dataset/{name}/raw_reward": statistics.fmean(held) for name, held in sets.items()}
    return values | {f"rollout/dataset/{name}/rollouts": float(len(held)) for name, held in sets.items()}


def _policy_age(rollouts: Iterable[Siblings]) -> dict[str, float]:
    """Updates between a rollout's policy and the newest of the batch; nothing where none is known."""
    versions = [
        min(policy_version(sample) for sample in siblings)
        for siblings in rollouts
        if all(sample.weight_versions for sample in siblings)
    ]
    if not versions:
        return {}
    ages = [max(versions) - version for version in versions]
    return {"rollout/policy_age/mean": statistics.fmean(ages), "rollout/policy_age/max": float(max(ages))}


def _zero_std(rewards: Iterable[tuple[Siblings, float]]) -> dict[str, float]:
    """Groups of two or more rollouts that all have the same reward, by that reward."""
    groups: dict[int | None, list[float]] = defaultdict(list)
    for siblings, reward in rewards:
        groups[siblings[0].group_index].append(reward)
    equal = Counter(r[0] for r in groups.values() if len(r) > 1 and len(set(r)) == 1)
    return {f"rollout/zero_std/count_{round(reward, 1)}": float(count) for reward, count in equal.items()}


def _cache_metrics(rollouts: Iterable[Siblings]) -> dict[str, float]:
    samples = list(flatten(list(rollouts)))
    cached = sum(sample.prefix_cache_info.cached_tokens for sample in samples)
    prompt = sum(sample.prefix_cache_info.total_prompt_tokens for sample in samples)
    if not prompt:
        return {}
    return {
        "rollout/prefix_cache_hit_rate": cached / prompt,
        "rollout/avg_cached_tokens_per_sample": cached / len(samples),
    }


def _speculation(args: Any, rollouts: Iterable[Siblings]) -> dict[str, float]:
    total = Sample.SpecInfo.total(sample.spec_info for sample in flatten(list(rollouts)))
    if not (total.spec_verify_ct or getattr(args, "sglang_speculative_algorithm", None)):
        return {}
    return {
        "rollout/spec_accept_rate": total.spec_accept_rate,
        "rollout/spec_accept_length": total.spec_accept_length,
    }


def _perf_metrics(
    args: Any, rollouts: Sequence[Siblings], trained: Sequence[int], seconds: float
) -> dict[str, float]:
    """Speeds over all response tokens; ``effective_`` ones over sampled tokens only."""
    gpus = getattr(args, "rollout_num_gpus", None) or 1
    whole = [sum(sample.response_length for sample in siblings) for siblings in rollouts]
    seconds = max(seconds, 1e-9)
    values = {
        "perf/rollout_time": seconds,
        "perf/tokens_per_gpu_per_sec": sum(whole) / seconds / gpus,
        "perf/longest_sample_tokens_per_sec": max(whole) / seconds,
        "perf/effective_tokens_per_gpu_per_sec": sum(trained) / seconds / gpus,
        "perf/longest_effective_sample_tokens_per_sec": max(trained) / seconds,
    }
    outside = [sum(sample.non_generation_time for sample in siblings) for siblings in rollouts]
    if any(outside):
        values |= {f"perf/non_generation_time/{k}": v for k, v in statistics_of(outside).items()}
    return values


def trained_tokens(siblings: Siblings) -> int:
    """Sampled tokens of a rollout; those that siblings share are counted once."""
    return sum(sample.effective_response_length for sample in siblings)


def _truncated(siblings: Siblings) -> bool:
    return siblings[-1].status is Sample.Status.TRUNCATED

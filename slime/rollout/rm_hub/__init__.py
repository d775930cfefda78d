"""Rewards: `async_rm` for one sample, `batched_async_rm` for a group; `verdict_on` and `verdicts_on` typed.

Invariant: the result is a finite number (or a dict with one under --reward-key), or `RewardError` is raised;
a wrong answer is 0.0, a check that broke is an error. Built-in checks run in killable processes.
"""

from __future__ import annotations

import asyncio
from typing import Any

from slime.errors import ConfigError, RewardError, SlimeError
from slime.rollout.groups import flatten
from slime.rollout.rm_hub.builtin import builtin_reward
from slime.rollout.rm_hub.custom import custom_reward
from slime.rollout.rm_hub.source import check_reward_source
from slime.rollout.rm_hub.validity import Reward, checked_reward, sample_name
from slime.rollout.rm_hub.verdict import Failed, Invalid, Valid, Verdict
from slime.utils.types import Sample

__all__ = [
    "Failed",
    "Invalid",
    "Valid",
    "Verdict",
    "async_rm",
    "batched_async_rm",
    "check_reward_source",
    "reward_seconds",
    "unwrapped",
    "verdict_on",
    "verdicts_on",
]

DEFAULT_TIMEOUT_S = 60.0


async def async_rm(args: Any, sample: Sample, **kwargs: Any) -> Reward:
    """The reward of one sample: from its own hook, the hook of `args`, or a built-in type.

    Args:
        args: reads custom_rm_path, rm_type, rm_url, judge_*, reward_key, reward_timeout, reward_num_workers.
        kwargs: passed on to a hook.

    Raises:
        RewardError: the reward could not be computed, or is not a finite number.
        HookError: the hook does not import or cannot take the call.
        ConfigError: no reward is configured, or its type is unknown.
    """
    return unwrapped(await verdict_on(args, sample, **kwargs))


async def batched_async_rm(
    args: Any, samples: list[Sample] | list[list[Sample]], **kwargs: Any
) -> list[Reward]:
    """The rewards of a group, in the order of its flattened samples.

    Under --group-rm the hook of `args` gets the list of samples at once; samples with a hook of their own
    are left out of it and rewarded by that. Otherwise every sample is rewarded by itself.

    Raises:
        As `async_rm`; the first error, after all other rewards are done.
    """
    return [unwrapped(verdict) for verdict in await verdicts_on(args, list(flatten(samples)), **kwargs)]


def unwrapped(verdict: Verdict) -> Reward:
    """The reward of a verdict.

    Raises:
        Exception: that of a failed one.
    """
    if isinstance(verdict, Failed):
        raise verdict.error
    reward: Reward = verdict.reward
    return reward


async def verdict_on(args: Any, sample: Sample, **kwargs: Any) -> Verdict:
    """The verdict on one sample; arguments as for `async_rm`.

    Raises:
        ConfigError: no reward is configured, or its type is unknown.
    """
    path = sample.custom_rm_path or getattr(args, "custom_rm_path", None)
    try:
        if path:
            return _checked(
                await _custom(path, args, sample, sample_name(sample), kwargs), path, sample, args
            )
        rm_type = sample.metadata.get("rm_type") or getattr(args, "rm_type", None)
        if not rm_type:
            raise ConfigError(
                "no reward is configured",
                place=sample_name(sample),
                remedy="set --rm-type or --custom-rm-path, or metadata.rm_type in the data",
            )
        value = await builtin_reward(rm_type.strip(), args, sample, reward_seconds(args))
        return _checked(value, f"reward {rm_type!r}", sample, args)
    except ConfigError:
        raise
    except SlimeError as error:
        return Failed(error)


async def verdicts_on(args: Any, samples: list[Sample], **kwargs: Any) -> list[Verdict]:
    """The verdicts on a group of samples, in order; with --group-rm as `batched_async_rm`.

    Raises:
        ConfigError: as `verdict_on`.
    """
    path = getattr(args, "custom_rm_path", None)
    together = (
        [s for s in samples if not s.custom_rm_path] if path and getattr(args, "group_rm", False) else []
    )
    alone = [s for s in samples if s.custom_rm_path] if together else samples
    jobs = [verdict_on(args, sample, **kwargs) for sample in alone]
    grouped, single = await asyncio.gather(_group(path, args, together, kwargs), asyncio.gather(*jobs))
    by_id = dict(zip(map(id, [*together, *alone]), [*grouped, *single], strict=True))
    return [by_id[id(sample)] for sample in samples]


async def _group(path: str | None, args: Any, samples: list[Sample], kwargs: dict[str, Any]) -> list[Verdict]:
    if not samples or path is None:
        return []
    place = f"group {samples[0].group_index} (samples {samples[0].index}..{samples[-1].index})"
    try:
        values = await _custom(path, args, samples, place, kwargs)
        if not isinstance(values, list | tuple) or len(values) != len(samples):
            found = f"{len(values)} rewards" if isinstance(values, list | tuple) else type(values).__name__
            raise RewardError(
                f"{path} returned {found} for a group of {len(samples)} samples",
                place=place,
                remedy="under --group-rm the hook gets a list of samples and returns one reward for each",
            )
        return [_checked(value, path, sample, args) for value, sample in zip(values, samples, strict=True)]
    except ConfigError:
        raise
    except SlimeError as error:
        return [Failed(error)] * len(samples)


def _checked(value: Any, source: str, sample: Sample, args: Any) -> Valid | Invalid:
    """The verdict for a raw value, if that is a reward."""
    if isinstance(value, Invalid):
        return Invalid(checked_reward(value.reward, source=source, sample=sample, args=args), value.reason)
    return Valid(checked_reward(value, source=source, sample=sample, args=args))


async def _custom(path: str, args: Any, target: Any, place: str, kwargs: dict[str, Any]) -> Any:
    return await custom_reward(path, args, target, seconds=reward_seconds(args), place=place, kwargs=kwargs)


def reward_seconds(args: Any) -> float:
    """``--reward-timeout``: the deadline of one reward."""
    return float(getattr(args, "reward_timeout", None) or DEFAULT_TIMEOUT_S)

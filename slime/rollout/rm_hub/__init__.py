"""Rewards: `async_rm` for one sample, `batched_async_rm` for a group.

Invariant: the result is a finite number (or a dict with one under --reward-key), or `RewardError` is raised;
a wrong answer is 0.0, a check that broke is an error. Built-in checks run in killable processes.
"""

from __future__ import annotations

import asyncio
from typing import Any

from slime.errors import ConfigError, RewardError, SlimeError
from slime.rollout.groups import flatten
from slime.rollout.hooks import flag_name, load_hook, run_hook
from slime.rollout.rm_hub.builtin import builtin_reward
from slime.rollout.rm_hub.source import check_reward_source
from slime.rollout.rm_hub.validity import Reward, checked_reward, sample_name
from slime.utils.types import Sample

__all__ = ["async_rm", "batched_async_rm", "check_reward_source"]

DEFAULT_TIMEOUT_S = 60.0


async def async_rm(args: Any, sample: Sample, **kwargs: Any) -> Reward:
    """The reward of one sample: from its own hook, the hook of `args`, or a built-in type.

    Args:
        args: reads custom_rm_path, rm_type, rm_url, reward_key, reward_timeout, reward_num_workers.
        kwargs: passed on to a hook.

    Raises:
        RewardError: the reward could not be computed, or is not a finite number.
        HookError: the hook does not import or cannot take the call.
        ConfigError: no reward is configured, or its type is unknown.
    """
    path = sample.custom_rm_path or getattr(args, "custom_rm_path", None)
    if path:
        value = await _custom(path, args, sample, sample_name(sample), kwargs)
        return checked_reward(value, source=path, sample=sample, args=args)
    rm_type = sample.metadata.get("rm_type") or getattr(args, "rm_type", None)
    if not rm_type:
        raise ConfigError(
            "no reward is configured",
            place=sample_name(sample),
            remedy="set --rm-type or --custom-rm-path, or metadata.rm_type in the data",
        )
    value = await builtin_reward(rm_type.strip(), args, sample, reward_seconds(args))
    return checked_reward(value, source=f"reward {rm_type!r}", sample=sample, args=args)


async def batched_async_rm(
    args: Any, samples: list[Sample] | list[list[Sample]], **kwargs: Any
) -> list[Reward]:
    """The rewards of a group, in the order of its flattened samples.

    Under --group-rm the hook of `args` gets the list of samples at once; samples with a hook of their own
    are left out of it and rewarded by that. Otherwise every sample is rewarded by itself.

    Raises:
        As `async_rm`; the first error, after all other rewards are done.
    """
    flat = list(flatten(samples))
    path = getattr(args, "custom_rm_path", None)
    together = [s for s in flat if not s.custom_rm_path] if path and getattr(args, "group_rm", False) else []
    alone = [s for s in flat if s.custom_rm_path] if together else flat
    jobs = [async_rm(args, sample, **kwargs) for sample in alone]
    results = await asyncio.gather(_group(path, args, together, kwargs), *jobs, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    grouped, *single = results
    by_id = dict(zip(map(id, [*together, *alone]), [*grouped, *single], strict=True))  # type: ignore[misc]
    return [by_id[id(sample)] for sample in flat]


async def _group(path: str | None, args: Any, samples: list[Sample], kwargs: dict[str, Any]) -> list[Reward]:
    if not samples or path is None:
        return []
    place = f"group {samples[0].group_index} (samples {samples[0].index}..{samples[-1].index})"
    values = await _custom(path, args, samples, place, kwargs)
    if not isinstance(values, list | tuple) or len(values) != len(samples):
        found = f"{len(values)} rewards" if isinstance(values, list | tuple) else type(values).__name__
        raise RewardError(
            f"{path} returned {found} for a group of {len(samples)} samples",
            place=place,
            remedy="under --group-rm the hook gets a list of samples and returns one reward for each",
        )
    return [
        checked_reward(value, source=path, sample=sample, args=args)
        for value, sample in zip(values, samples, strict=True)
    ]


async def _custom(path: str, args: Any, target: Any, place: str, kwargs: dict[str, Any]) -> Any:
    """The raw value of a reward hook, under the deadline of --reward-timeout."""
    hook = load_hook(path, "custom_rm_path")
    seconds = reward_seconds(args)
    try:
        async with asyncio.timeout(seconds) as deadline:
            return await run_hook(hook, flag_name("custom_rm_path"), (args, target), kwargs)
    except TimeoutError as error:
        if not deadline.expired():
            raise
        raise RewardError(
            f"{path} did not finish within {seconds:g} s", place=place, remedy="raise --reward-timeout"
        ) from error
    except SlimeError as error:
        if isinstance(error, RewardError):
            raise
        raise RewardError(f"{path}: {error}", place=place) from error


def reward_seconds(args: Any) -> float:
    """``--reward-timeout``: the deadline of one reward."""
    return float(getattr(args, "reward_timeout", None) or DEFAULT_TIMEOUT_S)

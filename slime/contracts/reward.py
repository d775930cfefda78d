"""Contracts of a reward hook: one sample at a time, or a group in one call under ``--group-rm``.

They go through `slime.rollout.rm_hub`, as a run does, so that what passes here is what trains.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any

from slime.contracts.finding import NotApplicableError, broken
from slime.contracts.material import group, snapshot
from slime.contracts.stage import PROBE_SECONDS, Stage
from slime.errors import DeadlineError, HookError, RewardError
from slime.rollout.groups import flatten
from slime.rollout.hooks import Hook, load_hook
from slime.rollout.rm_hub import async_rm, batched_async_rm
from slime.rollout.rm_hub.validity import check_reward_key
from slime.rollout.tasks import all_of, bounded
from slime.utils.types import Sample

DEST = "custom_rm_path"
_AT_ONCE = 8


class RewardCase:
    """A reward hook on a stage.

    Args:
        samples: finished rollouts of the user's generate hook, if there are any; else made-up ones are used.
    """

    def __init__(self, stage: Stage, path: str, samples: list[Sample] | None = None) -> None:
        self.stage = stage
        self.args = stage.args.with_values(custom_rm_path=path, rm_type=None)
        self.path = path
        self._samples = samples

    @functools.cached_property
    def hook(self) -> Hook:
        """The function, its signature checked."""
        return load_hook(self.path, DEST)

    def sample(self) -> Sample:
        """A finished rollout without a reward."""
        made = self._samples[-1] if self._samples else group("flat")[0]
        sample = Sample.from_dict(made.to_dict())
        sample.reward = None
        sample.label = sample.label if sample.label is not None else "42"
        return sample

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """The value of a reward call, under its deadline."""
        seconds = self.stage.seconds + 1.0
        return self.stage.run(bounded(work, seconds=seconds, what="the reward", place=self.path), seconds)

    @property
    def by_group(self) -> bool:
        """Whether the hook takes a whole group."""
        return bool(self.args.group_rm)


def takes_the_call(case: RewardCase) -> None:
    """The path loads, and the function takes (args, sample); (args, samples) under --group-rm."""
    _ = case.hook


def gives_a_number(case: RewardCase) -> str:
    """It gives a finite number in time, a list of one a turn or token, or a dict with --reward-key. None, NaN
    and exceptions are failures, never zero (law 4)."""
    if _of_hook(case).by_group:
        raise NotApplicableError("--group-rm: the hook takes whole groups")
    sample = case.sample()
    reward = case.run(async_rm(case.args, sample))
    check_reward_key(reward, sample=sample, args=case.args)
    return f"reward {reward!r:.60}"


def gives_a_number_a_sample(case: RewardCase) -> str:
    """Under --group-rm it gets the samples of a group as one flat list, fan-out or not, and gives a list with
    a reward for each."""
    if not _of_hook(case).by_group:
        raise NotApplicableError("no --group-rm: the hook takes one sample")
    for form in ("flat", "nested"):
        samples = list(flatten(group(form)))
        for sample in samples:
            sample.reward = None
        rewards = case.run(batched_async_rm(case.args, samples))
        for sample, reward in zip(samples, rewards, strict=True):
            check_reward_key(reward, sample=sample, args=case.args)
    return "flat and nested groups"


def leaves_the_sample_alone(case: RewardCase) -> None:
    """It changes no tokens, masks, log-probs or ids of what it judges."""
    sample = _of_hook(case).sample()
    before = snapshot([sample])
    _rewards(case, [sample])
    if snapshot([sample]) != before:
        raise broken("a sample as it was", "other tokens, mask, log-probs or ids", "write to metadata only")


def judges_many_at_once(case: RewardCase) -> str:
    """Eight calls at once succeed as one does."""
    _rewards(_of_hook(case), [case.sample()])
    rewards = case.run(_judged(case, [case.sample() for _ in range(_AT_ONCE)]))
    return f"{len(rewards)} at once"


def leaves_the_event_loop_free(case: RewardCase) -> None:
    """While it judges, rollouts go on: no wait of it holds up the event loop."""
    sample = _of_hook(case).sample()
    stood = case.run(_longest_stop(_judged(case, [sample])))
    if stood > PROBE_SECONDS:
        raise broken(
            "an event loop that moves", f"that it stood still for {stood:.1f} s", "await, or use a thread"
        )


CONTRACTS: tuple[Callable[[RewardCase], str | None], ...] = (
    takes_the_call,
    gives_a_number,
    gives_a_number_a_sample,
    leaves_the_sample_alone,
    judges_many_at_once,
    leaves_the_event_loop_free,
)


def _of_hook(case: RewardCase) -> RewardCase:
    try:
        _ = case.hook
    except HookError as error:
        raise NotApplicableError("the hook cannot be called") from error
    return case


def _rewards(case: RewardCase, samples: list[Sample]) -> list[Any]:
    """Their rewards; no more than `gives_a_number` says if there are none."""
    try:
        rewards: list[Any] = case.run(_judged(case, samples))
    except (HookError, RewardError, DeadlineError) as error:
        raise NotApplicableError("the hook gives no reward") from error
    return rewards


async def _judged(case: RewardCase, samples: list[Sample]) -> list[Any]:
    if case.by_group:
        return list(await batched_async_rm(case.args, samples))
    return list(await all_of(async_rm(case.args, sample) for sample in samples))


async def _longest_stop(work: Coroutine[Any, Any, Any]) -> float:
    """Seconds for which the loop did nothing else at most while `work` ran, however that ended."""
    task, loop = asyncio.create_task(work), asyncio.get_running_loop()
    longest, last = 0.0, loop.time()
    while not task.done():
        await asyncio.wait({task}, timeout=0.05)
        longest, last = max(longest, loop.time() - last), loop.time()
    if task.exception() is not None:
        raise NotApplicableError("the hook gives no reward") from task.exception()
    return longest

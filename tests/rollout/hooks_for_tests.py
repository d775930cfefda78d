"""Hooks that tests name by dotted path."""

import asyncio
import threading
import time

from slime.rollout.rm_hub import Invalid
from slime.utils.types import Sample


async def generate(args, sample, sampling_params):
    sample.response = "generated"
    return sample


async def generate_with_evaluation(args, sample, sampling_params, evaluation=False):
    sample.metadata["evaluation"] = evaluation
    return [sample]


async def generate_with_kwargs(args, sample, sampling_params, **kwargs):
    sample.metadata["kwargs"] = kwargs
    return sample


def generate_sync(args, sample, sampling_params):
    return sample


async def generate_text(args, sample, sampling_params):
    return "text"


async def generate_nothing(args, sample, sampling_params):
    return []


async def generate_error(args, sample, sampling_params):
    raise ZeroDivisionError("by zero")


async def two_arguments(args, sample):
    return 0.25


NOT_A_FUNCTION = 3


async def reward_half(args, sample, **kwargs):
    assert isinstance(sample, Sample)
    return 0.5


async def reward_from_label(args, sample, **kwargs):
    return sample.label


async def reward_group(args, samples, **kwargs):
    assert isinstance(samples, list)
    return [float(len(samples))] * len(samples)


async def reward_group_short(args, samples, **kwargs):
    return [1.0]


async def reward_sleeps(args, sample, **kwargs):
    await asyncio.sleep(60)


async def reward_raises(args, sample, **kwargs):
    raise KeyError("gone")


def reward_sync(args, sample, **kwargs):
    sample.metadata["thread"] = threading.current_thread().name
    return 1.0


def reward_sync_group(args, samples, **kwargs):
    return [0.25] * len(samples)


def reward_sync_raises(args, sample, **kwargs):
    raise KeyError("gone")


def reward_sync_exits(args, sample, **kwargs):
    raise SystemExit(3)


def reward_sync_async(args, sample, **kwargs):
    return reward_half(args, sample)


def reward_sync_spins(args, sample, **kwargs):
    sample.metadata["spins"] = True
    try:
        while True:
            pass
    finally:
        sample.metadata["spins"] = False


def reward_sync_sleeps(args, sample, **kwargs):
    time.sleep(1.0)
    return 1.0


class RewardObject:
    async def __call__(self, args, sample, **kwargs):
        return 0.75


reward_object = RewardObject()


async def reward_no_answer(args, sample, **kwargs):
    return Invalid(-1.0, "gave_up")


async def reward_nan_no_answer(args, sample, **kwargs):
    return Invalid(float("nan"), "gave_up")


def mark_sync(args, sample, *, rollout_id):
    sample.metadata["seen"] = [*sample.metadata.get("seen", []), ("sync", rollout_id)]


async def mark_async(args, sample, *, evaluation, rollout_id):
    sample.metadata["seen"] = [*sample.metadata.get("seen", []), ("async", rollout_id, evaluation)]
    return sample


def replace(args, sample):
    return Sample(index=sample.index, response="replaced")


def wrong_type(args, sample, **kwargs):
    return 1.0


def take_last(args, rollout_id, buffer, num_samples):
    taken = buffer[-num_samples:]
    del buffer[-num_samples:]
    return taken


def take_too_many(args, rollout_id, buffer, num_samples):
    return [*buffer, *buffer]


class NoSource:
    def __init__(self, args):
        pass

    def get_samples(self, n):
        return []


def halve_rewards(args, samples):
    """Half of each reward, as numbers or lists; the raw ones are totals."""
    raw = [sum(s.reward) if isinstance(s.reward, list) else s.reward for s in samples]
    half = [[v / 2 for v in s.reward] if isinstance(s.reward, list) else s.reward / 2 for s in samples]
    return raw, half


def one_list(args, samples):
    return [sample.reward for sample in samples]


def too_few_rewards(args, samples):
    return [1.0] * len(samples), [1.0]


def nan_rewards(args, samples):
    return [1.0] * len(samples), [float("nan")] * len(samples)


def nan_raw_rewards(args, samples):
    return [float("nan")] * len(samples), [1.0] * len(samples)


def raises_in_shaping(args, samples):
    return 1 / 0

"""User hooks for whole runs: rewards and generate functions, good and broken ones."""

import asyncio
import copy
import random

import psutil

from slime.rollout.sglang_rollout import generate, get_model_url
from slime.utils.http_utils import post


async def low_bytes(args, sample, **kwargs):
    """Share of response tokens in the lower half of the vocabulary: easy to learn for a random model."""
    tokens = sample.tokens[-sample.response_length :]
    return sum(token < 130 for token in tokens) / max(len(tokens), 1)


async def none_reward(args, sample, **kwargs):
    return None


async def raises_for_some(args, sample, sampling_params):
    """Every eighth rollout breaks."""
    if sample.index % 8 == 3:
        raise ValueError("the sandbox is on fire")
    return await generate(args, sample, sampling_params)


async def ends_the_engine(args, sample, sampling_params):
    """Kills the engine that this process has started."""
    for child in psutil.Process().children():
        child.kill()
    return await generate(args, sample, sampling_params)


async def always_raises(args, sample, sampling_params):
    raise ValueError("nothing works")


async def two_siblings(args, sample, sampling_params):
    """Fan-out: the same answer as two samples of one rollout."""
    sample = await generate(args, sample, sampling_params)
    return [sample, copy.deepcopy(sample)]


async def dawdles(args, sample, sampling_params):
    """Takes a time that is different in every run; every tenth rollout breaks."""
    await asyncio.sleep(random.SystemRandom().uniform(0, 0.1))
    if sample.index % 10 == 7:
        raise ValueError("the sandbox is on fire")
    sample = await generate(args, sample, sampling_params)
    await asyncio.sleep(random.SystemRandom().uniform(0, 0.05))
    return sample


async def ambles(args, sample, sampling_params):
    """Takes long enough for an engine to die meanwhile."""
    await asyncio.sleep(random.SystemRandom().uniform(0, 1.0))
    return await generate(args, sample, sampling_params)


async def slow(args, sample, sampling_params):
    await asyncio.sleep(600)


def wrong_signature(prompt):
    return prompt


NOT_A_FUNCTION = 3


async def low_bytes_by_turn(args, sample, **kwargs):
    """`low_bytes` as the reward of the only turn, beside a note."""
    return {"parts": {"turns": [await low_bytes(args, sample)]}, "note": "one turn"}


def double_rewards(args, samples):
    """Raw rewards, and twice as much to train on."""
    raw = [sample.reward["parts"]["turns"][0] for sample in samples]
    return raw, [{"turns": [2 * value]} for value in raw]


def no_advantages(args, rollout_data):
    """Forgets to set them."""


def halves_with_ids(args, samples):
    """Each sample as two rows of its rollout, and rewards around their mean."""
    mean = sum(sample.reward for sample in samples) / len(samples)
    rows = [(sample, half) for sample in samples for half in (0, 1)]
    return {
        "tokens": [sample.tokens for sample, _ in rows],
        "response_lengths": [sample.response_length for sample, _ in rows],
        "loss_masks": [[int(k % 2 == half) for k in range(s.response_length)] for s, half in rows],
        "rollout_log_probs": [sample.rollout_log_probs for sample, _ in rows],
        "rewards": [sample.reward - mean for sample, _ in rows],
        "raw_reward": [sample.reward for sample, _ in rows],
        "truncated": [0 for _ in rows],
        "sample_indices": [sample.index for sample, _ in rows],
        "rollout_ids": [sample.rollout_id for sample, _ in rows],
        "rollout_mask_sums": [sample.response_length for sample, _ in rows],
    }


def first_tokens_out(args, rollout_id, rollout_data):
    """Leaves the first response token out, in every rollout step but the first; halves the advantages."""
    for mask, advantages in zip(rollout_data["loss_masks"], rollout_data["advantages"], strict=True):
        mask[0] = mask[0] if rollout_id == 0 else 0
        advantages *= 0.5


async def asks_the_judge(args, sample, **kwargs):
    """A reward that asks another model of the topology first, which must not have the trainer's weights."""
    body = {"input_ids": sample.tokens[:8], "sampling_params": {"max_new_tokens": 1}}
    answer = await post(get_model_url(args, "judge"), body)
    if answer["meta_info"]["weight_version"] != "default":
        raise ValueError("the judge was given weights")
    return await low_bytes(args, sample)

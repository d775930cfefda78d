"""Rewards, filters, data sources and other hooks of which each breaks one contract."""

import asyncio
import copy
import time

from slime.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput
from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.rollout.groups import flatten
from slime.rollout.sglang_rollout import generate_rollout
from slime.utils.types import Sample
from tests.rollout.converters import rows_of


def one_argument(args):
    return None


# Rewards


async def reward_none(args, sample, **kwargs):
    return None


async def reward_nan(args, sample, **kwargs):
    return float("nan")


async def reward_raises(args, sample, **kwargs):
    raise ConnectionError("judge is down")


async def reward_hangs(args, sample, **kwargs):
    await asyncio.sleep(600)


async def reward_dict(args, sample, **kwargs):
    return {"score": 1.0}


async def reward_one_for_all(args, samples, **kwargs):
    return 1.0


async def reward_expects_groups_of_four(args, samples, **kwargs):
    return [1.0] * 4


async def reward_spoils_tokens(args, sample, **kwargs):
    sample.tokens.append(1)
    return 1.0


async def reward_blocks(args, sample, **kwargs):
    time.sleep(3.5)
    return 1.0


def reward_blocks_a_thread(args, sample, **kwargs):
    """Not broken: slime calls it on a thread."""
    time.sleep(0.2)
    return 1.0


async def reward_by_itself(args, sample, busy=[], **kwargs):  # noqa: B006 - shared on purpose
    """Cannot be called twice at once."""
    busy.append(sample)
    await asyncio.sleep(0.01)
    alone = len(busy) == 1
    busy.pop()
    if not alone:
        raise RuntimeError("already running")
    return 1.0


# Filters


def filter_flat_only(args, group, **kwargs):
    return sum(sample.reward for sample in group) > 0


def filter_none(args, group, **kwargs):
    return None


def filter_by_sample(args, group, **kwargs):
    """Keeps what has more than four samples."""
    return len(list(flatten(group))) > 4


def filter_pops(args, group, **kwargs):
    group.pop()
    return True


def filter_hangs(args, group, **kwargs):
    time.sleep(2)
    return True


def buffer_keeps(args, rollout_id, buffer, num_samples):
    return buffer[:num_samples]


def buffer_loses(args, rollout_id, buffer, num_samples):
    taken = buffer[:num_samples]
    buffer.clear()
    return taken


def buffer_too_many(args, rollout_id, buffer, num_samples):
    taken = list(buffer)
    buffer.clear()
    return taken


def buffer_makes_new(args, rollout_id, buffer, num_samples):
    return [copy.deepcopy(buffer.pop()) for _ in range(min(num_samples, len(buffer)))]


def sample_hook_number(args, sample):
    return 1.0


def sample_hook_cuts(args, sample):
    sample.loss_mask = sample.loss_mask[1:]


def sample_filter_flat_only(args, groups):
    for group in groups:
        group[0].remove_sample = True


def sample_filter_removes(args, groups):
    groups.pop()


def sample_filter_returns(args, groups):
    return groups[:1]


def all_samples_mean(args, groups, data_source):
    """A failed rollout has no reward."""
    return sum(sample.reward for sample in flatten(groups))


def shapes_one_list(args, samples):
    return [sample.reward for sample in samples]


def shapes_nan(args, samples):
    return [1.0] * len(samples), [float("nan")] * len(samples)


def converts_short_masks(args, samples):
    data = rows_of(args, samples)
    data["loss_masks"][0] = data["loss_masks"][0][1:]
    return data


def converts_centred_over_samples(args, samples):
    """The mean over samples counts a rollout of two samples twice."""
    data = rows_of(args, samples)
    mean = sum(data["rewards"]) / len(samples)
    return data | {"rewards": [reward - mean for reward in data["rewards"]]}


async def log_later(rollout_id, args, samples, extra_metrics, seconds):
    return True


def log_every_reward(rollout_id, args, samples, extra_metrics, seconds):
    return sum(sample.reward for sample in samples) >= 0


def eval_log_text(rollout_id, args, data, extra_metrics):
    return "logged"


# Data sources


class NoMethods:
    def __init__(self, args):
        pass


class NegativeLength(RolloutDataSourceWithBuffer):
    def __len__(self):
        return -1


class OneTooMany(RolloutDataSourceWithBuffer):
    def get_samples(self, num_samples):
        return super().get_samples(num_samples + 1)


class SameObject(RolloutDataSourceWithBuffer):
    def get_samples(self, num_samples):
        return [[group[0]] * len(group) for group in super().get_samples(num_samples)]


class SameIds(RolloutDataSourceWithBuffer):
    def get_samples(self, num_samples):
        self.sample_group_index = 0
        return super().get_samples(num_samples)


class Forgets(RolloutDataSourceWithBuffer):
    def add_samples(self, samples):
        pass


class StartsAgain(RolloutDataSourceWithBuffer):
    def load(self, rollout_id=None):
        pass


# Rollout functions


def rollout_one_group(args, rollout_id, data_source, evaluation=False):
    output = generate_rollout(args, rollout_id, data_source, evaluation)
    return output if evaluation else list(output.samples)[:1]


def rollout_none(args, rollout_id, data_source, evaluation=False):
    return None


def rollout_unrewarded(args, rollout_id, data_source, evaluation=False):
    output = generate_rollout(args, rollout_id, data_source, evaluation)
    for sample in flatten(output.samples):
        sample.reward = None
    return output


def rollout_half_groups(args, rollout_id, data_source, evaluation=False):
    output = generate_rollout(args, rollout_id, data_source, evaluation)
    return RolloutFnTrainOutput(samples=[group[:1] for group in output.samples])


def rollout_loses(args, rollout_id, data_source, evaluation=False):
    """Takes a group for nothing in every step."""
    data_source.get_samples(1)
    return list(generate_rollout(args, rollout_id, data_source, evaluation).samples)


def rollout_loses_beside_the_books(args, rollout_id, data_source, evaluation=False):
    """Takes two groups for nothing in every step, and gives the books of the others."""
    data_source.get_samples(2)
    return generate_rollout(args, rollout_id, data_source, evaluation)


def rollout_counts_too_few(args, rollout_id, data_source, evaluation=False):
    """Takes two groups for nothing, and says that it dropped one."""
    output = rollout_loses_beside_the_books(args, rollout_id, data_source, evaluation)
    output.metrics["stale/dropped"] = 1.0
    return output


def rollout_counts_what_it_drops(args, rollout_id, data_source, evaluation=False):
    """Nothing is broken: it drops two groups, and says so."""
    output = rollout_loses_beside_the_books(args, rollout_id, data_source, evaluation)
    output.metrics["stale/dropped"] = 2.0
    return output


def rollout_makes_rewards(args, rollout_id, data_source, evaluation=False):
    """Takes a failure for a reward of zero."""
    try:
        return generate_rollout(args, rollout_id, data_source, evaluation)
    except Exception:  # noqa: BLE001 - that is the fault
        groups = data_source.get_samples(args.rollout_batch_size)
        for sample in flatten(groups):
            sample.tokens, sample.response_length, sample.loss_mask = [0, 0], 1, [0]
            sample.status, sample.reward = Sample.Status.COMPLETED, 0.0
        return groups


def eval_short(args, rollout_id, data_source, evaluation=False):
    output = generate_rollout(args, rollout_id, data_source, evaluation=True)
    return {name: {**entry, "rewards": entry["rewards"][:1]} for name, entry in output.data.items()}


def eval_without_samples(args, rollout_id, data_source, evaluation=False):
    return RolloutFnEvalOutput(data={"mine": {"rewards": [1.0], "truncated": [False]}})

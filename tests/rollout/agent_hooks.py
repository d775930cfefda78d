"""Generate hooks, rewards and filters that behave well or badly, named by dotted path in tests."""

import asyncio
import copy
import sys
import threading
import time

from slime.rollout.filter_hub.base_types import DynamicFilterOutput
from slime.rollout.sglang_rollout import generate, generate_and_rm
from slime.utils.request_scope import current_scope
from slime.utils.types import Sample

RELEASE = threading.Event()
"""Ends the hooks that block."""
HERE = "tests.rollout.agent_hooks."


def write(sample, ids=(11, 12), log_probs=(-0.5, -0.25)):
    """Give a sample a prompt of one token and these sampled tokens."""
    sample.tokens = [5]
    sample.append_response_tokens(tokens=list(ids), log_probs=list(log_probs), text="x" * len(ids))
    sample.status = Sample.Status.COMPLETED
    return sample


async def good(args, sample, sampling_params):
    return write(sample)


TRIES = []
"""Response tokens that `works_the_third_time` was given, call by call."""


async def works_the_third_time(args, sample, sampling_params):
    TRIES.append(sample.response_length)
    write(sample)
    if len(TRIES) < 3:
        raise ValueError("not yet")
    return sample


async def three_turns_and_completed(args, sample, sampling_params):
    """Asks three times and looks at no finish reason."""
    for _ in range(3):
        sample = await generate(args, sample, dict(sampling_params))
    sample.status = Sample.Status.COMPLETED
    return sample


async def fails_behind_two_calls(args, sample, sampling_params):
    """Two calls, each within a rollout of its own; works the third time."""
    TRIES.append(sample.response_length)
    sample = await asks_by_rollout(args, sample, sampling_params)
    if len(TRIES) % 3:
        raise ValueError("not yet")
    return sample


IN_A_TOOL = []
"""Rollouts that are past their engine call and in a tool."""


async def gives_up_in_a_tool(args, sample, sampling_params):
    """One call, then a tool in which it gives up once its group is stopped; it does not say why."""
    sample = await generate(args, sample, sampling_params)
    IN_A_TOOL.append(sample.rollout_id)
    while not current_scope().stopped:
        await asyncio.sleep(0.01)
    sample.status = Sample.Status.ABORTED
    return sample


async def hangs_in_a_tool(args, sample, sampling_params):
    await generate(args, sample, sampling_params)
    await asyncio.sleep(3600)


async def sandbox_dies_in_a_tool(args, sample, sampling_params):
    sample = await gives_up_in_a_tool(args, sample, sampling_params)
    sample.metadata["abort_reason"] = "sandbox died"
    return sample


async def sandbox_dies_in_a_call(args, sample, sampling_params):
    sample = await generate(args, sample, sampling_params)
    sample.status, sample.metadata["abort_reason"] = Sample.Status.ABORTED, "sandbox died"
    return sample


async def half_built(args, sample, sampling_params):
    sample = await generate(args, sample, sampling_params)
    sample.loss_mask = [1]
    return sample


async def no_log_probs_yet(args, sample, sampling_params):
    sample = await generate(args, sample, sampling_params)
    sample.rollout_log_probs = None
    return sample


async def spoils_params(args, sample, sampling_params):
    sample.metadata["params"] = dict(sampling_params)
    sampling_params["max_new_tokens"] = 0
    return write(sample)


async def asks_three_times(args, sample, sampling_params):
    """Three candidates for one prompt: one by itself, two at once."""
    first = await generate(args, copy.deepcopy(sample), dict(sampling_params))
    drafts = [generate(args, copy.deepcopy(sample), dict(sampling_params)) for _ in range(2)]
    await asyncio.gather(*drafts)
    return first


async def asks_by_rollout(args, sample, sampling_params):
    """Two candidates, each as a rollout of its own."""
    drafts = []
    for _ in range(2):
        draft = copy.deepcopy(sample)
        draft.generate_function_path = HERE + "default_generate"
        drafts.append(await generate_and_rm(args, draft, dict(sampling_params)))
    return drafts[0]


async def default_generate(args, sample, sampling_params):
    return await generate(args, sample, sampling_params)


async def mixed(args, sample, sampling_params):
    """Fails for prompts that say so; else the default generation."""
    if "fail" in sample.prompt and sample.index % 2:
        raise ValueError("told to fail")
    return await generate(args, sample, sampling_params)


async def raises(args, sample, sampling_params):
    raise ValueError("a broken tool")


async def hangs(args, sample, sampling_params):
    await asyncio.sleep(3600)


BLOCKED = []
TOLD = []
"""What ends the hook that blocks the event loop."""


async def blocks_once(args, sample, sampling_params):
    """Holds the event loop until the test has been told, in the first rollout that gets here."""
    if not BLOCKED:
        BLOCKED.append(sample.rollout_id)
        end = time.monotonic() + 30
        while not TOLD and time.monotonic() < end:
            time.sleep(0.05)
    return write(sample)


async def swallows_cancellation(args, sample, sampling_params):
    """Goes on for about a second after every cancellation."""
    for _ in range(20):
        try:
            await asyncio.sleep(0.1)
        except asyncio.CancelledError:
            continue
    return write(sample)


async def cancels_itself(args, sample, sampling_params):
    raise asyncio.CancelledError


async def exits(args, sample, sampling_params):
    sys.exit(3)


async def returns_none(args, sample, sampling_params):
    return None


async def returns_text(args, sample, sampling_params):
    return "text"


async def returns_nothing(args, sample, sampling_params):
    return []


async def fans_out(args, sample, sampling_params):
    """Two siblings without ids of their own."""
    first, second = Sample(prompt=sample.prompt), Sample(prompt=sample.prompt)
    return [write(first, ids=[11, 12, 13], log_probs=[-0.1] * 3), write(second)]


async def fans_out_copies(args, sample, sampling_params):
    return [write(copy.deepcopy(sample)) for _ in range(3)]


async def asks_then_fans_out(args, sample, sampling_params):
    """The default generation, as two siblings."""
    sample = await generate(args, sample, sampling_params)
    return [sample, copy.deepcopy(sample)]


async def two_ids(args, sample, sampling_params):
    siblings = [write(copy.deepcopy(sample)) for _ in range(2)]
    siblings[1].rollout_id = 99
    return siblings


async def short_mask(args, sample, sampling_params):
    write(sample).loss_mask = [1]
    return sample


async def odd_mask(args, sample, sampling_params):
    write(sample).loss_mask = [1, 2]
    return sample


async def no_log_probs(args, sample, sampling_params):
    write(sample).rollout_log_probs = None
    return sample


async def nan_log_probs(args, sample, sampling_params):
    write(sample).rollout_log_probs = [-0.5, float("nan")]
    return sample


async def no_tokens(args, sample, sampling_params):
    sample.response = "only text"
    return sample


async def long_response(args, sample, sampling_params):
    write(sample).response_length = 9
    return sample


async def no_prompt(args, sample, sampling_params):
    write(sample).tokens = [11, 12]
    return sample


async def negative_id(args, sample, sampling_params):
    return write(sample, ids=(11, -2))


async def large_id(args, sample, sampling_params):
    return write(sample, ids=(11, 512))


async def gives_up(args, sample, sampling_params):
    sample.tokens, sample.response_length, sample.loss_mask = [0, 0], 1, [0]
    sample.status = Sample.Status.ABORTED
    sample.metadata["abort_reason"] = "sandbox died"
    return sample


async def reads_evaluation(args, sample, sampling_params, evaluation=False):
    write(sample).metadata["evaluation"] = evaluation
    return sample


async def reward_by_length(args, sample, **kwargs):
    return float(sample.response_length)


async def reward_score(args, sample, **kwargs):
    return {"score": 0.5}


async def reward_none(args, sample, **kwargs):
    return None


async def reward_nan(args, sample, **kwargs):
    return float("nan")


async def reward_raises(args, sample, **kwargs):
    raise ConnectionError("judge is down")


async def reward_hangs(args, sample, **kwargs):
    await asyncio.sleep(3600)


async def reward_group(args, samples, **kwargs):
    return [float(len(samples))] * len(samples)


async def reward_group_raises(args, samples, **kwargs):
    raise ConnectionError("judge is down")


def drop_all(args, group, **kwargs):
    return False


def drop_first_groups(args, group, **kwargs):
    return group[0].group_index >= 3


def filter_raises(args, group, **kwargs):
    raise KeyError("missing")


def filter_exits(args, group, **kwargs):
    sys.exit(3)


def filter_stops(args, group, **kwargs):
    return next(iter([]))


def batch_exits(args, groups, data_source=None):
    sys.exit(3)


def batch_blocks(args, groups, data_source=None):
    RELEASE.wait(20)


async def batch_hangs(args, groups, data_source=None):
    await asyncio.sleep(3600)


def filter_blocks(args, group, **kwargs):
    RELEASE.wait(20)
    return True


def remove_last(args, groups):
    for sample in groups[-1]:
        sample.remove_sample = True


SEEN = []


def remember(args, groups, data_source):
    SEEN.append([len(group) for group in groups])


def note_step(args, sample, *, rollout_id, evaluation):
    sample.metadata["seen"] = (rollout_id, evaluation)


def hook_raises(args, sample):
    raise RuntimeError("bad hook")


async def moody(args, sample, sampling_params):
    """Two turns of the default generation; every eleventh rollout has one of four faults."""
    fault = sample.index % 44
    for _ in range(2):
        sample.status = Sample.Status.PENDING
        await generate(args, sample, sampling_params)
    if fault == 10:
        raise ValueError("moody")
    if fault == 21:
        await asyncio.sleep(3600)
    if fault == 32:
        sample.loss_mask = [1]
    if fault == 43:
        raise asyncio.CancelledError
    return sample


async def moody_reward(args, sample, **kwargs):
    """0 or 1 by the sample; NaN, an error or a hang for some."""
    fault = sample.index % 51
    if fault == 9:
        return float("nan")
    if fault == 26:
        raise ConnectionError("judge is down")
    if fault == 43:
        await asyncio.sleep(3600)
    return float(sample.index % 2)


def drop_every_group(args, group, **kwargs):
    return DynamicFilterOutput(keep=False, reason="dull")

"""Generate hooks of which each breaks one contract, named after it."""

import asyncio
import copy
import itertools
import time
import urllib.request

from slime.rollout.sglang_rollout import GenerateState, generate, get_model_url
from slime.utils.http_utils import post
from slime.utils.types import Sample

CALLS = itertools.count()
SHARED = {}
LEFT = []


async def ask(args, sample, sampling_params, ids=None):
    """One engine call behind the sample's tokens, or behind `ids`."""
    state = GenerateState(args)
    if not sample.tokens:
        sample.tokens = list(state.tokenizer.encode(sample.prompt, add_special_tokens=False))
    return await state.engine.generate(
        ids or sample.tokens, dict(sampling_params), timeout=args.rollout_timeout
    )


def take(args, sample, answer, **changes):
    values = {"tokens": answer.output_ids, "log_probs": answer.log_probs, "text": answer.text} | changes
    sample.append_response_tokens(args, **values, meta_info=answer.meta_info)
    return sample


def takes_the_call(prompt):
    return prompt


async def gives_a_rollout(args, sample, sampling_params):
    raise KeyError("tools")


async def gives_up(args, sample, sampling_params):
    await generate(args, sample, sampling_params)
    sample.status = Sample.Status.FAILED
    sample.metadata["failure"] = "the sandbox is on fire"
    return sample


async def hangs(args, sample, sampling_params):
    await asyncio.sleep(600)


async def exits(args, sample, sampling_params):
    raise SystemExit(3)


def returns_samples_sync(args, sample, sampling_params):
    return sample


async def returns_samples(args, sample, sampling_params):
    return (await generate(args, sample, sampling_params)).response


async def returns_samples_none_of_them(args, sample, sampling_params):
    return []


async def asks_the_engine(args, sample, sampling_params):
    sample.tokens = [5]
    sample.append_response_tokens(tokens=[11, 12], log_probs=[-0.5, -0.25], text="xx")
    sample.status = Sample.Status.COMPLETED
    return sample


async def keeps_the_ids(args, sample, sampling_params):
    await generate(args, sample, sampling_params)
    sample.rollout_id = 99
    return sample


async def keeps_the_ids_of_siblings(args, sample, sampling_params):
    await generate(args, sample, sampling_params)
    sibling = copy.deepcopy(sample)
    sibling.group_index, sibling.loss_mask = 77, [0] * sibling.response_length
    return [sample, sibling]


async def siblings_are_one_rollout(args, sample, sampling_params):
    await generate(args, sample, sampling_params)
    sibling = copy.deepcopy(sample)
    sibling.rollout_id, sibling.loss_mask = 99, [0] * sibling.response_length
    return [sample, sibling]


async def siblings_are_one_rollout_twice(args, sample, sampling_params):
    await generate(args, sample, sampling_params)
    return [sample, sample]


async def lengths_agree(args, sample, sampling_params):
    await generate(args, sample, sampling_params)
    sample.loss_mask = [1]
    return sample


async def trains_only_sampled_tokens(args, sample, sampling_params):
    """Encodes the text again, with a space that the model never wrote."""
    answer = await ask(args, sample, sampling_params)
    ids = GenerateState(args).tokenizer.encode(" " + answer.text, add_special_tokens=False)
    return take(args, sample, answer, tokens=ids, log_probs=[-0.5] * len(ids))


async def trains_only_sampled_tokens_of_tools(args, sample, sampling_params):
    """Trains what a tool said."""
    take(args, sample, await ask(args, sample, sampling_params))
    tool = GenerateState(args).tokenizer.encode("<tool>7</tool>", add_special_tokens=False)
    sample.append_response_tokens(args, tokens=tool, log_probs=[-1.0] * len(tool))
    return take(args, sample, await ask(args, sample, sampling_params))


async def trains_tokens_in_their_context(args, sample, sampling_params):
    """Shows the engine a shorter prompt than the row has."""
    await ask(args, sample, {**sampling_params, "max_new_tokens": 1})
    return take(args, sample, await ask(args, sample, sampling_params, ids=sample.tokens[4:]))


async def trains_each_token_once(args, sample, sampling_params):
    await generate(args, sample, sampling_params)
    return [sample, copy.deepcopy(sample)]


async def keeps_the_engines_log_probs(args, sample, sampling_params):
    answer = await ask(args, sample, sampling_params)
    return take(args, sample, answer, log_probs=[0.0] * len(answer.output_ids))


async def keeps_sampling_params(args, sample, sampling_params):
    await generate(args, sample, sampling_params)
    sampling_params["max_new_tokens"] = 1
    return sample


async def keeps_sampling_params_in_requests(args, sample, sampling_params):
    return await generate(args, sample, {**sampling_params, "temperature": 0.2})


async def reward_is_a_number_or_unset(args, sample, sampling_params):
    await generate(args, sample, sampling_params)
    sample.reward = float("nan")
    return sample


async def can_be_stored(args, sample, sampling_params):
    await generate(args, sample, sampling_params)
    sample.metadata["client"] = object()
    return sample


async def repeats_itself(args, sample, sampling_params):
    """Trains one token less every time."""
    await generate(args, sample, sampling_params)
    untrained = next(CALLS) % sample.response_length
    sample.loss_mask[:untrained] = [0] * untrained
    return sample


async def leaves_nothing_running(args, sample, sampling_params):
    await generate(args, sample, sampling_params)
    LEFT.append(asyncio.create_task(asyncio.sleep(30)))
    return sample


async def leaves_the_event_loop_free(args, sample, sampling_params):
    """Asks the engine in a way that nobody else can do anything meanwhile."""
    import json

    ids = list(GenerateState(args).tokenizer.encode(sample.prompt, add_special_tokens=False))
    body = {"input_ids": ids, "sampling_params": sampling_params, "return_logprob": True}
    request = urllib.request.Request(
        get_model_url(args), json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as response:
        answer = json.load(response)
    sample.tokens = ids
    pairs = answer["meta_info"]["output_token_logprobs"]
    sample.append_response_tokens(
        args,
        tokens=[pair[1] for pair in pairs],
        log_probs=[pair[0] for pair in pairs],
        meta_info=answer["meta_info"],
    )
    return sample


async def keeps_rollouts_apart(args, sample, sampling_params):
    """Keeps the row in a global, so that rollouts at the same time overwrite it."""
    state = GenerateState(args)
    SHARED["tokens"] = list(state.tokenizer.encode(sample.prompt, add_special_tokens=False))
    await asyncio.sleep(0.01)
    sample.tokens = SHARED["tokens"]
    return take(args, sample, await ask(args, sample, sampling_params))


async def takes_evaluation(args, sample, sampling_params, evaluation=False):
    if evaluation:
        raise NotImplementedError("evaluation")
    return await generate(args, sample, sampling_params)


async def ends_when_the_engine_aborts(args, sample, sampling_params):
    await generate(args, sample, sampling_params)
    sample.status = Sample.Status.COMPLETED
    return sample


async def ends_when_it_is_cancelled(args, sample, sampling_params):
    """Takes a cancellation for the end of the answer."""
    try:
        return await generate(args, sample, sampling_params)
    except asyncio.CancelledError:
        sample.status = Sample.Status.ABORTED
        return sample


async def ends_when_it_is_cancelled_at_the_engine(args, sample, sampling_params):
    """Lets its request go on at the engine."""
    answer = asyncio.ensure_future(ask(args, sample, sampling_params))
    LEFT.append(answer)
    return take(args, sample, await asyncio.shield(answer))


async def ends_before_a_silent_engine(args, sample, sampling_params):
    """Takes silence for an empty answer."""
    answer = asyncio.ensure_future(generate(args, sample, sampling_params))
    done, _ = await asyncio.wait({answer}, timeout=args.rollout_timeout / 2)
    if not done:
        answer.cancel()
        await asyncio.wait({answer})
        sample.status, sample.reward = Sample.Status.TRUNCATED, 0.0
    return sample


async def fails_with_the_engine(args, sample, sampling_params):
    """Makes a failure of the engine a reward of zero."""
    try:
        return await generate(args, sample, sampling_params)
    except Exception:  # noqa: BLE001 - that is the fault
        sample.tokens, sample.response_length, sample.loss_mask = [0, 0], 1, [0]
        sample.status, sample.reward = Sample.Status.COMPLETED, 0.0
        return sample


async def fails_with_a_later_turn(args, sample, sampling_params):
    """Is content with the first turn."""
    take(args, sample, await ask(args, sample, sampling_params))
    try:
        return take(args, sample, await ask(args, sample, sampling_params))
    except Exception:  # noqa: BLE001 - that is the fault
        return sample


async def outlives_an_overload(args, sample, sampling_params):
    """Answers by itself when the engine is busy."""
    ids = list(GenerateState(args).tokenizer.encode(sample.prompt, add_special_tokens=False))
    body = {"input_ids": ids, "sampling_params": sampling_params, "return_logprob": True}
    try:
        answer = await post(get_model_url(args), body, max_retries=0)
        pairs = [pair[:2] for pair in answer["meta_info"]["output_token_logprobs"]]
        sample.status = Sample.Status.COMPLETED
    except Exception as error:
        if getattr(error, "status", None) != 429:
            raise
        pairs = [(-1.0, 70), (-1.0, 71)]
    sample.tokens = ids
    sample.append_response_tokens(args, tokens=[p[1] for p in pairs], log_probs=[p[0] for p in pairs])
    return sample


async def blocks_for_ever(args, sample, sampling_params):
    time.sleep(30)

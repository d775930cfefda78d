"""A generate hook of two turns with a tool between them, and one that fans out."""

import copy

from slime.rollout.sglang_rollout import GenerateState, generate
from slime.serving.scripted import ScriptedAnswer
from slime.utils.types import Sample


async def two_turns(args, sample, sampling_params, evaluation=False):
    """Asks, shows what a tool said, asks again; the budget is each turn's."""
    await generate(args, sample, sampling_params)
    if sample.status in (Sample.Status.ABORTED, Sample.Status.TRUNCATED):
        return [sample]
    tool = GenerateState(args).tokenizer.encode("\nThe tool says 42.\n", add_special_tokens=False)
    sample.append_response_tokens(args, tokens=tool, log_probs=None, trainable=False, text="...")
    await generate(args, sample, sampling_params)
    sample.metadata["turns"] = 2
    return [sample]


async def fans_out(args, sample, sampling_params):
    """The answer, and a summary that is a row of its own."""
    summary = copy.deepcopy(sample)
    summary.prompt = f"Sum up: {sample.prompt}"
    return [await generate(args, sample, sampling_params), await generate(args, summary, sampling_params)]


async def needs_metadata(args, sample, sampling_params):
    """For one tool only."""
    assert sample.metadata["tool"] == "lookup"
    return await generate(args, sample, sampling_params)


async def calls_a_tool(args, sample, sampling_params):
    """Goes on as long as the model calls."""
    tool = GenerateState(args).tokenizer.encode("\n42\n", add_special_tokens=False)
    await generate(args, sample, sampling_params)
    while sample.response.endswith("CALL<|im_end|>"):
        sample.append_response_tokens(args, tokens=tool, log_probs=None, trainable=False, text="\n42\n")
        await generate(args, sample, sampling_params)
    return sample


def tool_script(call):
    """Calls once."""
    return ScriptedAnswer(text="so 42" if "CALL" in call.prompt else "CALL")

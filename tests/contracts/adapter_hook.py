"""The generate hook of docs/en/agents.md: a program with a provider's client, behind an adapter."""

from openai import AsyncOpenAI

from slime.agent.adapters import OpenAIAdapter
from slime.agent.aiohttp_threaded import run_app_in_thread
from slime.agent.session import new_session_id
from slime.rollout.sglang_rollout import GenerateState, get_model_url

_adapters = {}


def adapter(args):
    """One adapter an engine, for all rollouts."""
    url = get_model_url(args, endpoint="")
    if url not in _adapters:
        made = OpenAIAdapter(tokenizer=GenerateState(args).tokenizer, sglang_url=url)
        _adapters[url] = made, run_app_in_thread(made.app)
    return _adapters[url]


async def generate(args, sample, sampling_params):
    """Two turns of a chat."""
    server, handle = adapter(args)
    sid = new_session_id()
    server.open_session(sid, sampling_defaults=sampling_params, max_context_tokens=2048)
    messages = [{"role": "user", "content": sample.prompt}]
    try:
        async with AsyncOpenAI(base_url=f"{handle.url}/s/{sid}/v1", api_key=sid, max_retries=0) as client:
            for _ in range(2):
                answer = await client.chat.completions.create(model="policy", messages=messages)
                messages += [answer.choices[0].message.model_dump(exclude_none=True)]
                messages += [{"role": "user", "content": "Are you sure?"}]
        return await server.finish_session(sid, base_sample=sample, reward=None)
    finally:
        await server.drop_session(sid)

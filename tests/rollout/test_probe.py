import asyncio

import pytest
from aiohttp import web

from slime.errors import DataError, EngineUnavailableError
from slime.rollout.probe import probe_samples
from slime.rollout.sglang_rollout import GenerateState
from tests.rollout.kit import ListSource, engine_args, raw_server, scripted, state_for


@pytest.fixture(autouse=True)
def forget_state():
    yield
    GenerateState.clear_instance()


def test_the_probe_leaves_the_data_where_it_is():
    source = ListSource()
    with scripted() as server:
        state_for(args := engine_args(server.url))
        rows = probe_samples(args, source)
    assert len(rows) == 4
    assert all(row.rollout_log_probs and row.response_length for row in rows)
    assert [group[0].group_index for group in source.get_samples(5)] == [0, 1, 2, 3, 4]


class AwkwardSource(ListSource):
    """Prompts that cannot be answered, before the number `good`."""

    def __init__(self, good):
        super().__init__(size=1)
        self.good = good

    def _group(self, number):
        group = super()._group(number)
        if number < self.good:
            group[0].prompt = [[{"role": "user", "content": "no template"}], "long" * 20, "aborted"][
                number % 3
            ]
        return group


async def answers(request):
    """400 for a long prompt, an abort for seven tokens of prompt, else two tokens."""
    length = len((await request.json())["input_ids"])
    if length > 20:
        return web.json_response({"error": {"message": "too long"}}, status=400)
    finish, ids = ("abort", []) if length == len("aborted") else ("stop", [70, 71])
    meta = {
        "finish_reason": {"type": finish},
        "output_token_logprobs": [[-0.5, token, None] for token in ids],
    }
    return web.json_response({"output_ids": ids, "text": "", "meta_info": meta})


def probe(source, **values):
    """What the probe gives on an engine that refuses and aborts some prompts."""

    async def main():
        async with raw_server(answers) as url:
            state = state_for(args := engine_args(url, **values))
            state.__dict__["tokenizer"] = NoTemplate()
            return await asyncio.to_thread(probe_samples, args, source)

    return asyncio.run(main())


class NoTemplate:
    def encode(self, text, **options):
        return list(text.encode())

    def apply_chat_template(self, *_, **options):
        raise ValueError("no chat template")


def test_the_probe_passes_over_awkward_prompts():
    rows = probe(AwkwardSource(good=7), reward_key="score")
    assert [row.rollout_id for row in rows] == [7, 8, 9, 10]
    assert all(row.votes and row.response_length == 2 for row in rows)


def test_the_probe_tells_the_first_reason_when_no_prompt_can_be_answered():
    with pytest.raises(
        DataError, match="none of the first 32 prompts .* the first: sample 0: .* no chat template"
    ):
        probe(AwkwardSource(good=99))


def test_the_probe_fails_without_an_engine():
    with scripted() as server:
        pass
    state_for(args := engine_args(server.url))
    with pytest.raises(EngineUnavailableError):
        probe_samples(args, ListSource())

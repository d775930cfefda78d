"""A teacher behind an engine's URL scores what the student sampled."""

import asyncio
import math
from types import SimpleNamespace

import pytest
from aiohttp import web

from slime.errors import ConfigError, DataError, RewardError
from slime.rollout.convert import to_train_samples
from slime.rollout.on_policy_distillation import ask_teacher, post_process_rewards, reward_func
from slime.rollout.sample_hooks import apply_rollout_sample_hooks
from slime.serving.script import scripted_logprob
from slime.utils.types import Sample
from tests.rollout.kit import finished, raw_server, scripted

PATH = "slime.rollout.on_policy_distillation.ask_teacher"


def sample(index=3, **fields):
    return finished(Sample(index=index, group_index=0, rollout_id=index), **fields)


def args(url, **values):
    return SimpleNamespace(rm_url=f"{url}/generate", reward_timeout=5.0, **values)


def test_the_teacher_scores_the_response():
    with scripted() as server:
        one, other = sample(), sample(tokens=[5, 6, 7, 8, 9], response_length=3, loss_mask=[1, 0, 1])
        hooked = args(server.url, rollout_sample_hook_path=[PATH])
        asyncio.run(apply_rollout_sample_hooks(hooked, [one, other], rollout_id=0))
        assert one.teacher_log_probs == pytest.approx([scripted_logprob(8), scripted_logprob(9)])
        assert other.teacher_log_probs == pytest.approx([scripted_logprob(t) for t in (7, 8, 9)])


def test_evaluation_failures_and_empty_responses_are_not_scored():
    failed = sample(status=Sample.Status.FAILED)
    empty = sample(response_length=0, loss_mask=[], rollout_log_probs=[])
    for one, evaluation in ((failed, False), (empty, False), (sample(), True)):
        asyncio.run(ask_teacher(SimpleNamespace(), one, evaluation=evaluation))
        assert one.teacher_log_probs is None


def test_as_a_reward_it_gives_nothing_but_the_scores():
    with scripted() as server:
        one = sample(reward=None)
        assert asyncio.run(reward_func(args(server.url), one)) == 0.0
    assert len(one.teacher_log_probs) == 2
    assert post_process_rewards(SimpleNamespace(), [sample(reward=0.5)]) == ([0.5], [0.5])


def test_rows_carry_the_scores_and_missing_ones_are_an_error():
    opd = SimpleNamespace(use_opd=True)
    (row,) = to_train_samples([[sample(teacher_log_probs=[-1.0, -2.0])]], opd)
    assert row.teacher_log_probs == (-1.0, -2.0)
    with pytest.raises(DataError, match="teacher_log_probs is missing for a response of 2 tokens") as caught:
        to_train_samples([[sample()]], opd)
    assert "sample 3 (rollout 3)" in str(caught.value) and PATH in str(caught.value)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({}, "gave no input_token_logprobs for a response of 2 tokens"),
        ({"input_token_logprobs": [[-1.0, 9, None]]}, "gave 1 log-probs for a response of 2 tokens"),
        (
            {"input_token_logprobs": [[-1.0, 8, None], [-1.0, 4, None]]},
            "scored token 4 with -1.0 at response token 1 of 2, which is token 9",
        ),
        ({"input_token_logprobs": [[None, 8, None], [-1.0, 9, None]]}, "scored token 8 with None"),
        ({"input_token_logprobs": [[math.inf, 8, None], [-1.0, 9, None]]}, "scored token 8 with inf"),
    ],
)
def test_a_teacher_that_did_not_score_these_tokens_is_an_error(answer, message):
    async def run():
        async def handler(request):
            return web.json_response({"meta_info": answer})

        async with raw_server(handler) as url:
            await ask_teacher(args(url), sample())

    with pytest.raises(RewardError, match=message) as caught:
        asyncio.run(run())
    assert "sample 3 (rollout 3)" in str(caught.value)


def test_a_teacher_that_cannot_answer_is_an_error():
    async def broken():
        async def handler(request):
            return web.json_response({"error": "no"}, status=400)

        async with raw_server(handler) as url:
            await ask_teacher(args(url), sample())

    async def slow():
        async def handler(request):
            await asyncio.sleep(60)

        async with raw_server(handler) as url:
            await ask_teacher(SimpleNamespace(rm_url=f"{url}/generate", reward_timeout=0.05), sample())

    for run, message in ((broken, "the teacher failed"), (slow, "no answer within 0.05 s")):
        with pytest.raises(RewardError, match=message):
            asyncio.run(run())
    with pytest.raises(ConfigError, match="the teacher needs an address"):
        asyncio.run(ask_teacher(SimpleNamespace(), sample()))

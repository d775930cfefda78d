import asyncio

import pytest

from slime.errors import ConfigError, DataError
from slime.rollout.generate import generate_sample, new_token_budget, prompt_ids
from slime.serving.scripted import ScriptedAnswer, scripted_logprob
from slime.utils.engine_client import EngineClient
from slime.utils.types import Sample
from tests.rollout.kit import scripted, tokenizer


def run(server, sample, params=None, limit=None):
    return asyncio.run(
        generate_sample(
            sample,
            {"max_new_tokens": 8} if params is None else params,
            engine=EngineClient(server.url),
            tokenizer=tokenizer(),
            max_context_len=limit,
            timeout=20.0,
        )
    )


def test_law_1_only_what_the_engine_sampled_trains():
    with scripted(lambda call: ScriptedAnswer(token_ids=[70, 71, 72])) as server:
        sample = run(server, Sample(prompt="ab", index=0))
    prompt = tokenizer().encode("ab", add_special_tokens=False)
    assert sample.tokens == [*prompt, 70, 71, 72]
    assert sample.loss_mask == [1, 1, 1]
    assert sample.rollout_log_probs == [scripted_logprob(token) for token in (70, 71, 72)]
    assert sample.status is Sample.Status.COMPLETED
    assert sample.weight_versions == ["default"]
    assert sample.response == tokenizer().decode([70, 71, 72])


def test_messages_are_rendered_with_the_chat_template():
    sample = Sample(prompt=[{"role": "user", "content": "hi"}])
    text = tokenizer().decode(prompt_ids(sample, tokenizer()))
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_a_sample_goes_on_from_its_tokens_within_the_rest_of_its_budget():
    with scripted(lambda call: ScriptedAnswer(token_ids=[70] * 20)) as server:
        sample = Sample(tokens=[5, 6], index=0)
        sample.append_response_tokens(tokens=[60], log_probs=[-0.5])
        run(server, sample, {"max_new_tokens": 4, "min_new_tokens": 4})
        assert server.engine.calls[0].input_ids == (5, 6, 60)
        assert server.engine.calls[0].params.min_new_tokens == 3
    assert sample.response_length == 4
    assert sample.status is Sample.Status.TRUNCATED


def test_the_context_bounds_prompt_and_response_together():
    with scripted(lambda call: ScriptedAnswer(token_ids=[70] * 20)) as server:
        sample = run(server, Sample(prompt="abc", index=0), limit=5)
    assert len(sample.tokens) == 5
    assert sample.status is Sample.Status.TRUNCATED


def test_without_budget_nothing_is_asked_and_the_sample_is_truncated():
    with scripted() as server:
        sample = Sample(tokens=[5, 60, 61], response_length=2, loss_mask=[1, 1], rollout_log_probs=[-1.0] * 2)
        run(server, sample, {"max_new_tokens": 2})
        assert server.engine.calls == []
    assert sample.status is Sample.Status.TRUNCATED
    assert sample.response_length == 2


def test_a_prompt_that_fills_the_context_fails_with_both_lengths():
    sample = Sample(tokens=[5] * 9, index=4)
    with pytest.raises(DataError, match=r"sample 4: the prompt has 9 tokens, the context holds 9"):
        new_token_budget(sample, {"max_new_tokens": 8}, 9)


def test_an_empty_prompt_fails():
    with pytest.raises(DataError, match="sample 4: the prompt is empty"):
        prompt_ids(Sample(prompt="", index=4), tokenizer())


def test_without_any_limit_the_flag_is_named():
    with pytest.raises(ConfigError, match="--rollout-max-response-len"):
        new_token_budget(Sample(tokens=[5]), {}, None)


def test_an_abort_at_the_engine_keeps_the_tokens_and_says_so():
    async def main(server):
        engine = EngineClient(server.url)
        sample = Sample(prompt="ab", index=0)
        task = asyncio.create_task(
            generate_sample(
                sample,
                {"max_new_tokens": 8},
                engine=engine,
                tokenizer=tokenizer(),
                max_context_len=None,
                timeout=20.0,
            )
        )
        while not server.engine.calls:
            await asyncio.sleep(0.01)
        await engine.abort_all()
        return await task

    with scripted(lambda call: ScriptedAnswer(hang=True)) as server:
        assert asyncio.run(main(server)).status is Sample.Status.ABORTED

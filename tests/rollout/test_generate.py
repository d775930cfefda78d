import asyncio
import json
from types import SimpleNamespace

import numpy as np
import pytest
from aiohttp import web

from slime.errors import ConfigError, DataError, EngineError
from slime.rollout.generate import generate_sample, new_token_budget, prompt_ids
from slime.serving.scripted import ScriptedAnswer, scripted_logprob
from slime.utils.engine_client import EngineClient
from slime.utils.routes import encoded_routes
from slime.utils.types import Sample
from tests.rollout.kit import raw_server, scripted, tokenizer


def run(server, sample, params=None, limit=None, args=None):
    return asyncio.run(
        generate_sample(
            sample,
            {"max_new_tokens": 8} if params is None else params,
            engine=EngineClient(server.url),
            tokenizer=tokenizer(),
            max_context_len=limit,
            timeout=20.0,
            args=args,
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


def test_routes_of_experts_are_asked_for_and_kept_from_call_to_call(tmp_path):
    sizes = {"num_hidden_layers": 2, "num_experts": 8, "num_experts_per_tok": 2}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    args = SimpleNamespace(use_rollout_routing_replay=True, hf_checkpoint=str(tmp_path))
    asked = []

    async def handler(request):
        body = await request.json()
        asked.append((body["return_routed_experts"], body["routed_experts_start_len"]))
        known = len(body["input_ids"]) - body["routed_experts_start_len"]
        meta = {"output_token_logprobs": [[-0.5, 70, None]], "finish_reason": {"type": "abort"}}
        meta["routed_experts"] = encoded_routes(np.full(4 * known, 10 * len(asked), np.int32))
        return web.json_response({"text": "", "output_ids": [70], "meta_info": meta})

    async def calls():
        sample = Sample(tokens=[5, 6, 7], index=0)
        async with raw_server(handler) as url:
            for number in range(3):
                if number == 2:
                    sample.append_response_tokens(tokens=[90], log_probs=None, trainable=False)
                await generate_sample(
                    sample,
                    {"max_new_tokens": 8},
                    engine=EngineClient(url),
                    tokenizer=tokenizer(),
                    max_context_len=None,
                    timeout=20.0,
                    args=args,
                )
        return sample

    sample = asyncio.run(calls())
    assert asked == [(True, 0), (True, 3), (True, 4)]
    assert sample.tokens == [5, 6, 7, 70, 70, 90, 70]
    assert sample.rollout_routed_experts[:, 0, 0].tolist() == [10, 10, 10, 20, 30, 30]


def test_an_engine_that_tells_no_routes_is_an_error_that_says_what_to_do():
    args = SimpleNamespace(use_rollout_routing_replay=True)
    with (
        scripted(lambda call: ScriptedAnswer(token_ids=[70])) as server,
        pytest.raises(EngineError, match=r"tells no routed experts(.|\n)*--enable-return-routed-experts"),
    ):
        run(server, Sample(prompt="ab", index=0), args=args)


def test_counters_of_speculative_decoding_reach_the_sample():
    meta = {"spec_num_correct_drafts": 3, "spec_num_proposed_drafts": 6, "spec_verify_ct": 2}
    with scripted(lambda call: ScriptedAnswer(token_ids=[70, 71, 72, 73], meta_info=meta)) as server:
        args = SimpleNamespace(sglang_speculative_algorithm="EAGLE")
        sample = run(server, Sample(prompt="ab", index=0), args=args)
    assert (sample.spec_info.spec_accept_rate, sample.spec_info.spec_accept_length) == (0.5, 2.0)

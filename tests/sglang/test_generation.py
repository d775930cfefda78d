"""What rollouts need of real servers, through the client that rollouts have."""

import asyncio

import pytest

from slime.utils.engine_client import EngineClient
from slime.utils.request_scope import RequestScope, entered
from tests.serving.engines import LONG, PROMPT, greedy
from tests.sglang.servers import NEWER

SAMPLED = {"max_new_tokens": 24, "ignore_eos": True}


@pytest.fixture
def version(request):
    return request.node.callspec.params["server"]


def with_client(server, use):
    """The result of `use(client)`."""
    return asyncio.run(use(EngineClient(server.url)))


@pytest.fixture(scope="module")
def model(sglang_model):
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(sglang_model, dtype=torch.float32)


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_log_probs_are_those_of_the_model_at_the_temperature(server, model, temperature):
    import torch

    params = SAMPLED | {"temperature": temperature}
    answer = with_client(server, lambda client: client.generate(PROMPT, params, timeout=60))
    assert len(answer.output_ids) == len(answer.log_probs) == 24
    ids = torch.tensor([[*PROMPT, *answer.output_ids]])
    with torch.no_grad():
        logits = model(ids).logits[0, len(PROMPT) - 1 : -1]
    expected = torch.log_softmax(logits / (temperature or 1.0), -1)
    expected = expected.gather(1, ids[0, len(PROMPT) :, None])[:, 0]
    torch.testing.assert_close(torch.tensor(answer.log_probs), expected, atol=2e-4, rtol=0)


def test_a_stream_tells_each_token_once(server):
    told = []

    async def stream(client):
        return await client.generate(PROMPT, greedy(24), timeout=60, on_tokens=told.append)

    answer = with_client(server, stream)
    assert [token for new in told for token in new.ids] == answer.output_ids
    assert [value for new in told for value in new.log_probs] == answer.log_probs
    assert (
        with_client(server, lambda c: c.generate(PROMPT, greedy(24), timeout=60)).output_ids
        == answer.output_ids
    )


@pytest.mark.parametrize("by", ["abort", "abort_all", "pause"])
def test_what_was_sampled_before_an_abort_is_kept(server, by):
    async def run(client):
        begun = asyncio.Event()
        task = asyncio.create_task(
            client.generate(
                PROMPT, greedy(LONG), rid=f"cut-{by}", timeout=60, on_tokens=lambda _: begun.set()
            )
        )
        await begun.wait()
        await {
            "abort": lambda: client.abort(f"cut-{by}"),
            "abort_all": client.abort_all,
            "pause": lambda: client.pause("abort"),
        }[by]()
        answer = await task
        await client.resume()
        return answer

    answer = with_client(server, run)
    assert answer.finish_reason == "abort"
    assert 0 < len(answer.output_ids) == len(answer.log_probs) < LONG


def test_the_end_of_a_scope_keeps_what_was_sampled(server):
    async def run(client):
        scope, begun = RequestScope(), asyncio.Event()
        with entered(scope):
            task = asyncio.create_task(
                client.generate(PROMPT, greedy(LONG), timeout=60, on_tokens=lambda _: begun.set())
            )
            await begun.wait()
            await scope.stop(20)
        return await task

    answer = with_client(server, run)
    assert answer.finish_reason == "abort"
    assert 0 < len(answer.output_ids) < LONG


def test_a_cancelled_call_leaves_nothing_running(server):
    async def run(client):
        begun = asyncio.Event()
        task = asyncio.create_task(
            client.generate(PROMPT, greedy(LONG), timeout=60, on_tokens=lambda _: begun.set())
        )
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        async with asyncio.timeout(20):
            while (await client.loads())[0]["num_running_reqs"]:
                await asyncio.sleep(0.05)

    with_client(server, run)


def test_a_request_during_a_pause_is_answered_after_it(server):
    async def run(client):
        await client.pause("abort")
        task = asyncio.create_task(client.generate(PROMPT, greedy(4), timeout=60))
        done, _ = await asyncio.wait({task}, timeout=0.5)
        assert not done
        await client.resume()
        return await task

    assert len(with_client(server, run).output_ids) == 4


def test_a_request_paused_in_place_goes_on(server):
    async def run(client):
        begun = asyncio.Event()
        task = asyncio.create_task(
            client.generate(PROMPT, greedy(LONG), timeout=60, on_tokens=lambda _: begun.set())
        )
        await begun.wait()
        await client.pause("in_place")
        await client.begin_weight_update()
        await client.end_weight_update()
        await client.resume()
        return await task

    answer = with_client(server, run)
    assert answer.finish_reason == "length"
    assert len(answer.output_ids) == LONG


def test_what_the_server_can_do(server, version):
    (able,) = with_client(server, EngineClient.capabilities).values()
    assert (able.engine, able.version) == ("sglang", version)
    is_newer = version == NEWER
    assert able.weight_sessions == able.version_spans == able.checksums == is_newer
    assert ("retract" in able.pauses) == is_newer
    assert not (able.lora or able.routed_experts or able.pulls_weights or able.repeats_seeds)
    assert (able.tool_call_parser, able.reasoning_parser) == ("qwen", "qwen3")


def test_an_idle_server_is_healthy_and_says_so(server):
    async def run(client):
        assert await client.health()
        assert (await client.model_info())["weight_version"]
        return await client.loads()

    (load,) = with_client(server, run)
    assert (load["num_running_reqs"], load["num_waiting_reqs"]) == (0, 0)

import asyncio

import pytest
from aiohttp import web

from slime.errors import DeadlineError, EngineError, EngineRequestError, EngineUnavailableError
from slime.serving.scripted import ScriptedAnswer, scripted_logprob
from slime.utils.engine_client import EngineClient
from slime.utils.generation import VersionSpan
from tests.rollout.kit import raw_server, scripted, until

PROMPT = [40, 41, 42]


def client(url, **options):
    return EngineClient(url, **({"backoff": 0.01} | options))


def call(url, params=None, **options):
    """One generation at `url`."""
    options = {"timeout": 20.0} | options
    return asyncio.run(client(url).generate(PROMPT, params or {"max_new_tokens": 8}, **options))


def with_raw(handler, use):
    """The result of `use(client)` against a server with one handler for /generate."""

    async def main():
        async with raw_server(handler) as url:
            return await use(client(url, retries=2))

    return asyncio.run(main())


def generated(engine):
    return engine.generate(PROMPT, {"max_new_tokens": 8}, timeout=20.0)


def test_law_1_ids_and_log_probs_are_the_engines_own():
    with scripted(lambda call: ScriptedAnswer(token_ids=[70, 71], cached_tokens=2)) as server:
        answer = call(server.url, rid="r1")
    assert answer.output_ids == [70, 71]
    assert answer.log_probs == [scripted_logprob(70), scripted_logprob(71)]
    assert answer.finish_reason == "stop"
    assert answer.weight_versions == (VersionSpan("default", 0, 2),)
    assert answer.meta_info["cached_tokens"] == 2
    assert server.engine.calls[0].rid == "r1"


def test_a_bad_request_is_not_retried_and_keeps_the_engines_words():
    with scripted() as server:
        with pytest.raises(EngineRequestError, match="answered 400: top_p"):
            call(server.url, {"top_p": 5})
        assert server.engine.calls == []


def test_an_engine_error_is_not_retried():
    with scripted(lambda call: ScriptedAnswer(error=(500, "out of memory"))) as server:
        with pytest.raises(EngineError, match="answered 500: out of memory"):
            call(server.url)
        assert len(server.engine.calls) == 1


@pytest.mark.parametrize("status", [429, 502, 503, 504])
def test_what_a_retry_can_help_is_retried(status):
    def busy_at_first(call):
        return ScriptedAnswer(error=(status, "busy")) if call.number < 2 else ScriptedAnswer(text="a")

    with scripted(busy_at_first) as server:
        assert call(server.url).text == "a"
        assert len(server.engine.calls) == 3


def test_retries_end():
    with (
        scripted(lambda call: ScriptedAnswer(error=(503, "busy"))) as server,
        pytest.raises(EngineUnavailableError, match=r"answered 503: busy \(6 tries\)"),
    ):
        call(server.url)


def test_an_engine_that_is_not_there_is_unavailable():
    with scripted() as server:
        pass
    with pytest.raises(EngineUnavailableError, match="6 tries"):
        call(server.url)


def test_an_engine_that_dies_while_it_generates_is_unavailable():
    dying = ScriptedAnswer(text="abcdef", token_latency=0.01, die_after=2)
    with scripted(lambda call: dying) as server, pytest.raises(EngineUnavailableError):
        call(server.url)


def test_cancelling_aborts_the_request_by_its_rid():
    async def main(server):
        task = asyncio.create_task(
            client(server.url).generate(PROMPT, {"max_new_tokens": 8}, rid="r7", timeout=20.0)
        )
        await until(lambda: server.engine.calls)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: server.engine.events)

    with scripted(lambda call: ScriptedAnswer(hang=True)) as server:
        asyncio.run(main(server))
        assert "abort:r7" in server.engine.events


def test_past_its_timeout_the_request_is_aborted():
    with scripted(lambda call: ScriptedAnswer(hang=True)) as server:
        with pytest.raises(DeadlineError, match=r"request r8: no answer within 0.2 s"):
            call(server.url, rid="r8", timeout=0.2)
        asyncio.run(until(lambda: "abort:r8" in server.engine.events))


def answering(**fields):
    """A handler whose answer lacks or breaks a field."""
    meta = {"output_token_logprobs": [[-0.5, 70, None]], "finish_reason": {"type": "stop"}}
    body = {"text": "a", "output_ids": [70], "meta_info": meta | fields.pop("meta_info", {})} | fields

    async def handler(request):
        return web.json_response(body)

    return handler


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"output_ids": None}, "does not return token ids"),
        ({"meta_info": {"output_token_logprobs": None}}, "does not return log-probs"),
        ({"meta_info": {"output_token_logprobs": []}}, "0 log-probs for 1 output ids"),
        ({"meta_info": {"output_token_logprobs": [[-0.5, 71, None]]}}, "is of token 71, output id is 70"),
        ({"meta_info": {"output_token_logprobs": [[None, 70, None]]}}, "is None, expected a number"),
    ],
)
def test_a_missing_capability_is_named(fields, message):
    with pytest.raises(EngineError, match=message):
        with_raw(answering(**fields), generated)


def test_an_answer_that_is_no_object_is_shown():
    async def handler(request):
        return web.Response(text="hello")

    with pytest.raises(EngineError, match="answered 'hello'"):
        with_raw(handler, generated)


def test_an_answer_cut_short_is_unavailable():
    async def handler(request):
        response = web.StreamResponse(headers={"Content-Length": "1000"})
        await response.prepare(request)
        await response.write(b'{"text":')
        request.transport.close()
        return response

    with pytest.raises(EngineUnavailableError, match="died while it answered"):
        with_raw(handler, generated)


def test_one_version_stands_for_the_whole_where_spans_are_missing():
    answer = with_raw(answering(meta_info={"weight_version": "4"}), generated)
    assert answer.weight_versions == (VersionSpan("4", 0, 1),)


def test_the_routing_key_is_a_header():
    seen = []

    async def handler(request):
        seen.append(request.headers.get("X-SMG-Routing-Key"))
        return await answering()(request)

    with_raw(handler, lambda c: c.generate(PROMPT, {}, routing_key="session-1", timeout=20.0))
    assert seen == ["session-1"]


def test_control_calls_go_to_every_worker_behind_a_router():
    async def main(url):
        async def workers(request):
            return web.json_response({"workers": [{"url": one.url}, {"url": two.url}]})

        async with raw_server(workers, "/workers") as router:
            await client(router).pause("in_place")
            await client(router).resume()

    with scripted() as one, scripted() as two:
        asyncio.run(main(one.url))
        assert one.engine.events == two.engine.events == ["pause:in_place", "resume"]


def test_the_control_calls_of_an_engine():
    async def main(engine):
        assert await engine.health()
        assert (await engine.model_info())["weight_version"] == "default"
        assert "version" in await engine.server_info()
        assert (await engine.loads())[0]["num_running_reqs"] == 0
        await engine.flush_cache()
        await engine.release_memory(["kv_cache"])
        await engine.resume_memory(["kv_cache"])
        await engine.abort_all()
        await engine.abort("unknown")

    with scripted() as server:
        asyncio.run(main(client(server.url)))
        assert server.engine.events == ["flush", "release", "resume_memory"]


def test_an_engine_that_is_gone_is_not_healthy():
    with scripted() as server:
        pass
    assert asyncio.run(client(server.url).health()) is False


def test_a_refused_weight_update_raises():
    async def main():
        async def refuses(request):
            return web.json_response({"success": False, "message": "no such file"})

        async with raw_server(refuses, "/update_weights_from_disk") as url:
            await client(url).update_weights_from_disk("nowhere", weight_version="2")

    with pytest.raises(EngineError, match="no such file"):
        asyncio.run(main())


def test_two_hundred_requests_run_at_once():
    async def main(server):
        engine = client(server.url)
        calls = [engine.generate(PROMPT, {"max_new_tokens": 4}, timeout=20.0) for _ in range(200)]
        running = asyncio.gather(*calls)
        await until(lambda: len(server.engine.calls) == 200, "200 requests in flight")
        await engine.abort_all()
        return await running

    with scripted(lambda call: ScriptedAnswer(hang=True)) as server:
        answers = asyncio.run(main(server))
    assert [answer.finish_reason for answer in answers] == ["abort"] * 200


def test_tokens_are_told_as_they_come():
    told = []
    slow = ScriptedAnswer(token_ids=[70, 71, 72], token_latency=0.05)
    with scripted(lambda call: slow) as server:
        answer = call(server.url, on_tokens=told.append)
    assert len(told) > 1
    assert [token for new in told for token in new.ids] == answer.output_ids == [70, 71, 72]
    assert [value for new in told for value in new.log_probs] == answer.log_probs
    assert [version for new in told for version in new.versions] == ["default"] * 3
    assert answer.log_probs == [scripted_logprob(token) for token in (70, 71, 72)]
    assert answer.finish_reason == "stop"


def test_a_refusal_is_the_same_for_a_stream():
    with scripted() as server, pytest.raises(EngineRequestError, match="answered 400: top_p"):
        call(server.url, {"top_p": 5}, on_tokens=print)


def test_a_stream_that_dies_is_not_begun_again():
    told = []
    dying = ScriptedAnswer(text="abcdef", token_latency=0.05, die_after=2)
    with scripted(lambda call: dying) as server, pytest.raises(EngineUnavailableError):
        call(server.url, on_tokens=told.append)
    assert len(server.engine.calls) == 1
    assert sum(len(new.ids) for new in told) <= 2


@pytest.mark.parametrize(
    ("events", "error", "message"),
    [
        (b'data: {"error": {"message": "out of memory"}}\n\n', EngineError, "out of memory"),
        (b'data: {"output_ids": [1], "meta_info": {}}\n\n', EngineUnavailableError, "stream ended before"),
        (b"data: [DONE]\n\n", EngineUnavailableError, "stream ended before"),
        (
            b'data: {"output_ids": [1], "meta_info": {"completion_tokens": 2}}\n\n',
            EngineError,
            "tells of 2 tokens and holds 1",
        ),
    ],
)
def test_a_stream_without_its_end_is_an_error(events, error, message):
    async def handler(request):
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(events)
        return response

    async def generate(engine):
        return await engine.generate(PROMPT, {"max_new_tokens": 8}, timeout=20.0, on_tokens=lambda new: None)

    with pytest.raises(error, match=message):
        with_raw(handler, generate)


def test_routes_of_experts_are_asked_for():
    asked = []

    async def handler(request):
        asked.append(await request.json())
        raise web.HTTPBadRequest

    async def generate(engine):
        await engine.generate(PROMPT, {}, timeout=20.0, return_routed_experts=True)

    with pytest.raises(EngineRequestError):
        with_raw(handler, generate)
    assert asked[0]["return_routed_experts"] is True

"""The router that slime brings: the suite of all routers, and what only it promises."""

import asyncio
import contextlib
import json
import urllib.error
import urllib.request
from collections import Counter

import aiohttp
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from slime.config.router_section import RouterSettings, router_settings
from slime.config.serving_sections import ServingConfig
from slime.errors import ConfigError, EngineError, EngineUnavailableError
from slime.serving.embedded_router.policies import ConsistentHashing, PowerOfTwo, policy_named
from slime.serving.router import plan_router
from slime.serving.scripted import ScriptedAnswer
from slime.serving.topology import ServedModel, ServerGroup
from slime.utils.engine_client import EngineClient
from slime.utils.rendezvous import chosen, ranked
from tests.rollout.kit import raw_server
from tests.serving import routing
from tests.serving.router_suite import *  # noqa: F403
from tests.serving.routing import (
    MODEL,
    BackgroundRouter,
    ask,
    ask_all,
    background_router,
    engines,
    forget,
    places,
)
from tests.serving.wire import later, wait_for


@pytest.fixture
def start():
    return background_router


names = st.lists(st.text("abc:/0123", min_size=1), min_size=1, max_size=6, unique=True)


@given(names, st.text())
def test_a_key_that_loses_its_worker_goes_to_its_next_and_nothing_else_moves(urls, key):
    order = ranked(key, urls)
    assert sorted(order) == sorted(urls)
    assert chosen(key, urls) == order[0]
    for gone in urls:
        rest = [url for url in urls if url != gone]
        if rest:
            assert chosen(key, rest) == (order[1] if gone == order[0] else order[0])


@given(st.integers(2, 6))
def test_keys_are_spread_evenly(count):
    urls = [f"http://host:{30000 + n}" for n in range(count)]
    counts = Counter(chosen(f"session-{n}", urls) for n in range(400))
    assert min(counts.values()) > 400 / count / 2


class Load:
    def __init__(self, url, load=0):
        self.url, self.load = url, load


def test_power_of_two_never_takes_the_busier_of_the_two_that_it_draws():
    workers = [Load("a", 5), Load("b", 1), Load("c", 3)]
    taken = Counter(PowerOfTwo().choose(workers, None).url for _ in range(200))
    assert "a" not in taken
    assert set(taken) == {"b", "c"}


def test_consistent_hashing_without_a_key_takes_the_least_loaded_in_turn():
    policy = ConsistentHashing()
    assert policy.choose([Load("a", 1), Load("b")], None).url == "b"
    even = [Load("a"), Load("b"), Load("c")]
    assert {policy.choose(even, None).url for _ in range(3)} == {"a", "b", "c"}


@pytest.mark.parametrize("name", ["round_robin", "power_of_two", "consistent_hashing"])
def test_one_worker_is_enough_for_every_policy(name):
    policy, only = policy_named(name), [Load("a")]
    assert {policy.choose(only, key).url for key in (None, "s")} == {"a"}


def test_only_keys_of_the_new_worker_move(start):
    keys = [f"s{n}" for n in range(30)]
    with engines(3) as servers, start(servers[:2]) as router:
        ask_all(router.url, keys)
        before = places(servers, keys)
        forget(servers)
        router.client.add(servers[2].url)
        ask_all(router.url, keys)
        after = places(servers, keys)
    moved = [(old, new) for old, new in zip(before, after, strict=True) if old != new]
    assert moved
    assert all(new == 2 for _, new in moved)


@contextlib.asynccontextmanager
async def worker(handler):
    """A server with one handler for every path, and /health."""

    async def answer(request):
        return web.Response() if request.path == "/health" else await handler(request)

    app = web.Application()
    app.router.add_route("*", "/{rest:.*}", answer)
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
    finally:
        await runner.cleanup()


@contextlib.asynccontextmanager
async def routed(*handlers, **settings):
    """A router before workers with these handlers, and a client session."""
    async with contextlib.AsyncExitStack() as stack:
        urls = [await stack.enter_async_context(worker(handler)) for handler in handlers]
        router = await asyncio.to_thread(BackgroundRouter, RouterSettings(**settings))
        stack.push_async_callback(asyncio.to_thread, router.stop)
        for url in urls:
            await asyncio.to_thread(router.client.add, url)
        yield router.url, await stack.enter_async_context(aiohttp.ClientSession())


def test_bodies_headers_and_statuses_pass_unchanged():
    strange = b'{"input_ids": [1],  "unknown_field": {"x": 1e-7}, "return_routed_experts": true}'
    seen = []

    async def echo(request):
        seen.append((request.method, request.path_qs, request.headers.get("X-Own"), await request.read()))
        return web.Response(body=b"\x00\xff", status=418, headers={"X-Answer": "yes"})

    async def main():
        async with routed(echo) as (router, session):
            async with session.post(router + "/generate?a=b", data=strange, headers={"X-Own": "1"}) as answer:
                assert (answer.status, answer.headers["X-Answer"]) == (418, "yes")
                assert await answer.read() == b"\x00\xff"
            async with session.get(router + "/v1/models"):
                pass

    asyncio.run(main())
    assert seen == [("POST", "/generate?a=b", "1", strange), ("GET", "/v1/models", None, b"")]


def test_the_engine_client_sends_everything_through_it():
    seen = []

    async def answers(request):
        if request.path == "/workers":
            raise web.HTTPNotFound
        seen.append(await request.json())
        meta = {"output_token_logprobs": [[-0.5, 70, None]], "finish_reason": {"type": "stop"}}
        return web.json_response({"text": "a", "output_ids": [70], "meta_info": meta})

    async def main():
        async with routed(answers) as (router, _):
            client = EngineClient(router)
            await client.generate([1], {"custom_params": {"a": 1}}, timeout=9.0, return_routed_experts=True)

    asyncio.run(main())
    assert seen[0]["return_routed_experts"] is True
    assert seen[0]["sampling_params"] == {"custom_params": {"a": 1}}


def test_an_answer_that_began_is_not_begun_again():
    calls = []

    async def dies(request):
        calls.append(request.path)
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"data: {}\n\n")
        request.transport.close()
        return response

    async def main():
        async with routed(dies, dies) as (router, session), session.post(router + "/generate") as answer:
            assert answer.status == 200
            with pytest.raises(aiohttp.ClientPayloadError):
                await answer.read()

    asyncio.run(main())
    assert len(calls) == 1


def test_a_request_past_its_deadline_is_told_and_ended():
    ended = []

    async def hangs(request):
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(True)

    async def main(limit):
        async with (
            routed(hangs, request_timeout_secs=limit) as (router, session),
            session.post(router + "/generate") as answer,
        ):
            assert answer.status == 504
            assert f"within {limit:g} s" in (await answer.json())["error"]["message"]

    asyncio.run(main(0.2))
    if not ended:  # a slow machine did not even send it on in this time
        asyncio.run(main(5.0))
    assert ended == [True]


def test_a_connection_that_broke_at_a_live_worker_is_tried_there_again():
    calls = []

    async def flaky(request):
        calls.append(request.path)
        if len(calls) == 1:
            request.transport.abort()
            await asyncio.sleep(1)
        return web.json_response({"n": len(calls)})

    async def main():
        async with routed(flaky) as (router, session), session.post(router + "/generate") as answer:
            assert (answer.status, await answer.json()) == (200, {"n": 2})

    asyncio.run(main())


def test_what_steers_one_engine_is_not_routed(start):
    with engines(1) as servers, start(servers) as router:
        for path in ("/pause_generation", "/update_weights_from_tensor", "/abort_request"):
            request = urllib.request.Request(router.url + path, b"{}")
            with pytest.raises(urllib.error.HTTPError) as caught:
                urllib.request.urlopen(request, timeout=10)
            assert caught.value.code == 404
            assert "ask the workers" in json.loads(caught.value.read())["error"]["message"]


def test_the_cache_is_flushed_at_every_worker(start):
    with engines(2) as servers, start(servers) as router:
        request = urllib.request.Request(router.url + "/flush_cache", b"")
        with urllib.request.urlopen(request, timeout=10) as answer:
            assert set(json.loads(answer.read())) == {server.url for server in servers}
        assert [server.engine.events for server in servers] == [["flush"], ["flush"]]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "url must be"),
        (b'{"url": 1}', "url must be"),
        (b'{"url": "http://a:1", "worker_type": "x"}', "regular"),
    ],
)
def test_a_worker_that_cannot_be_is_refused(start, body, message):
    with start() as router:
        request = urllib.request.Request(router.url + "/workers", body)
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(request, timeout=10)
        assert caught.value.code == 400
        assert message in json.loads(caught.value.read())["error"]["message"]


def test_a_router_process_serves_its_workers_and_ends(tmp_path):
    with engines(2) as servers, routing.router(tmp_path / "router.log", servers) as router:
        assert {worker.url for worker in router.client.workers()} == {server.url for server in servers}
        assert len(ask(router.url)["output_ids"]) == 3
        assert router.is_alive
    assert not router.is_alive
    assert "is a worker" in router.log_tail()


def test_a_router_process_that_does_not_find_its_workers_is_stopped(tmp_path):
    with engines(1) as gone:
        pass
    plan = plan_router(MODEL, ServingConfig(), {}, engine="embedded")
    workers = [routing.Registration(url=gone[0].url)]
    with pytest.raises(EngineUnavailableError, match="nothing listens there"):
        routing.start_router(plan, tmp_path / "router.log", workers=workers, find_timeout=1.0)


def test_a_router_that_cannot_listen_says_why(tmp_path):
    with (
        routing.router(tmp_path / "one.log") as router,
        pytest.raises(ConfigError, match=r"--sglang-router-port: cannot listen on 127.0.0.1:\d+: Address"),
    ):
        routing.start_router(router.plan, tmp_path / "two.log", port=int(router.url.rsplit(":", 1)[1]))


def test_settings_are_closed():
    assert router_settings({"policy": "round_robin"}).policy == "round_robin"
    with pytest.raises(ConfigError, match=r"--router-polcy: is no setting.*\n.*it has .*policy"):
        router_settings({"polcy": "round_robin"})
    with pytest.raises(ConfigError, match="must be one of consistent_hashing, power_of_two, round_robin"):
        router_settings({"policy": "cache_aware"})


def test_which_router_runs_follows_from_the_flags():
    ours = plan_router(MODEL, ServingConfig(), {}, engine="embedded")
    assert (ours.kind, ours.policy) == ("slime", "consistent_hashing")
    assert ours.settings["disable_health_check"] is True
    watched = plan_router(MODEL, ServingConfig(use_fault_tolerance=True), {}, engine="embedded")
    assert watched.settings["health_check_interval_secs"] == 1
    assert "disable_health_check" not in watched.settings
    with pytest.raises(ConfigError, match="--router-cache-threshold: is no setting of the router that slime"):
        plan_router(MODEL, ServingConfig(), {"cache_threshold": 1}, engine="embedded")
    with pytest.raises(ConfigError, match="--sglang-python"):
        plan_router(MODEL, ServingConfig(sglang_python="no-such-python"), {}, engine="embedded")


def test_without_sglang_router_prefill_and_decode_are_refused():
    groups = tuple(ServerGroup(worker_type=kind, num_gpus=1) for kind in ("prefill", "decode"))
    model = ServedModel(name="m", model_path="p", groups=groups, place="t.yaml:3")
    with pytest.raises(ConfigError, match=r"t.yaml:3: m has servers that prefill for others"):
        plan_router(model, ServingConfig(), {}, engine="embedded")


def listing_router(workers, **more):
    """A stand-in for sglang-router's list, which passes nothing on."""

    async def handler(request):
        return web.json_response({"workers": workers, "total": len(workers)} | more)

    return raw_server(handler, "/workers")


def listed(server, **more):
    return {"id": server.url, "url": server.url, "is_healthy": True, "worker_type": "regular"} | more


async def routed_experts(client, key):
    return await client.generate(
        [40], {"max_new_tokens": 2}, routing_key=key, timeout=9.0, return_routed_experts=True
    )


def test_what_a_router_would_lose_goes_to_the_sessions_own_worker():
    async def main(servers):
        async with listing_router([listed(server) for server in servers]) as url:
            client = EngineClient(url, retries=0)
            for key in [f"s{n}" for n in range(8)] * 2:
                await routed_experts(client, key)
            with pytest.raises(EngineError, match="404"):
                await client.generate([40], {"max_new_tokens": 2}, timeout=9.0)

    with engines(2) as servers:
        asyncio.run(main(servers))
        urls = [server.url for server in servers]
        for server in servers:
            assert len(server.engine.calls) == 2 * sum(chosen(f"s{n}", urls) == server.url for n in range(8))


def test_a_dead_worker_is_not_asked_again_for_what_goes_to_workers_themselves():
    async def main(alive, dead):
        workers = [listed(alive), listed(dead)]
        async with listing_router(workers) as url:
            client = EngineClient(url, backoff=0.01)
            keys = [f"s{n}" for n in range(20)]
            key = next(key for key in keys if chosen(key, [alive.url, dead.url]) == dead.url)
            asking = asyncio.create_task(routed_experts(client, key))
            await asyncio.sleep(0.05)
            workers[1]["is_healthy"] = False
            return await asking

    with engines(1) as (alive,):
        with engines(1) as (dead,):
            pass
        assert asyncio.run(main(alive, dead)).finish_reason in ("stop", "length")


def test_prefilling_and_decoding_workers_are_not_asked_without_their_router():
    async def main():
        workers = [
            {"id": "1", "url": "http://127.0.0.1:9", "worker_type": "prefill"},
            {"id": "2", "url": "http://127.0.0.1:10", "worker_type": "decode"},
        ]
        async with listing_router(workers) as url:
            await routed_experts(EngineClient(url), "s")

    with pytest.raises(EngineError, match="the router drops return_routed_experts"):
        asyncio.run(main())


def test_a_router_without_healthy_workers_is_unavailable_for_such_calls():
    async def main():
        workers = [{"id": "1", "url": "http://127.0.0.1:9", "worker_type": "regular", "is_healthy": False}]
        async with listing_router(workers) as url:
            client = EngineClient(url, retries=1, backoff=0.01)
            with pytest.raises(EngineUnavailableError, match="no healthy worker"):
                await client.server_info()
            await routed_experts(client, "s")

    with pytest.raises(EngineUnavailableError, match="no healthy worker"):
        asyncio.run(main())


def test_load_is_what_is_in_flight(start):
    with engines(1, lambda call: ScriptedAnswer(hang=True)) as (one,), start([one]) as router:
        body = {"input_ids": [1], "sampling_params": {"max_new_tokens": 4}}
        asked = later(router.url, "/generate", body)
        wait_for(lambda: one.engine.calls and [worker.load for worker in router.client.workers()] == [1])
        urllib.request.urlopen(urllib.request.Request(one.url + "/abort_request", b'{"abort_all": true}'))
        asked.result()
        wait_for(lambda: [worker.load for worker in router.client.workers()] == [0])


def test_it_is_asked_nothing_that_the_engines_own_face_would_not_answer(start):
    with engines(1) as (one,), start([one]) as router:
        for path in ("/v1/models", "/model_info", "/get_server_info"):
            with urllib.request.urlopen(router.url + path, timeout=10) as answer:
                assert answer.status == 200
        assert ask(router.url)["output_ids"] == ask(one.url)["output_ids"]

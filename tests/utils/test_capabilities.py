"""What an engine can do is read off the running server, and the client does what that engine takes."""

import asyncio
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from slime.errors import EngineError, EngineUnavailableError
from slime.utils.capabilities import capabilities_of
from slime.utils.engine_client import EngineClient
from slime.utils.engine_probe import probe
from tests.rollout.kit import scripted

NEW, OLD = {"version": "0.5.23"}, {"version": "0.5.15.post1"}
NEW_ROUTES = frozenset({"/begin_weight_update", "/v1/loads", "/load_lora_adapter"})
OLD_ROUTES = frozenset({"/v1/loads", "/get_load", "/load_lora_adapter"})


def of_new(**info):
    return capabilities_of(NEW | info, NEW_ROUTES, "here")


def of_old(**info):
    return capabilities_of(OLD | info, OLD_ROUTES, "here")


@asynccontextmanager
async def server(info, routes):
    """A server of such routes, and what was called."""
    called = []

    def handler(answer):
        async def handle(request):
            called.append((request.method, request.path))
            return web.json_response(answer)

        return handle

    app = web.Application()
    for (method, path), answer in routes.items():
        app.router.add_route(method, path, handler(answer))
    app.router.add_get("/server_info", handler(info))
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}", called
    finally:
        await runner.cleanup()


OLD_LOAD = [{"dp_rank": 0, "num_reqs": 5, "num_waiting_reqs": 2, "num_tokens": 70}]
OLD_SERVER = {("GET", "/v1/loads"): "broken", ("GET", "/get_load"): OLD_LOAD}


def test_of_a_newer_server():
    able = of_new()
    assert able.engine == "sglang"
    assert able.weight_sessions and able.version_spans and able.checksums
    assert able.pauses == {"abort", "in_place", "retract"}
    assert able.loads_route == "/v1/loads"
    assert not (able.routed_experts or able.lora or able.pulls_weights or able.repeats_seeds)


def test_of_the_oldest_server():
    able = of_old()
    assert not (able.weight_sessions or able.version_spans or able.checksums)
    assert able.pauses == {"abort", "in_place"}
    assert able.loads_route == "/get_load"


def test_how_it_was_started_decides_the_rest():
    able = of_new(
        enable_lora=True,
        enable_return_routed_experts=True,
        enable_deterministic_inference=True,
        tool_call_parser="qwen",
    )
    assert able.lora and able.routed_experts and able.repeats_seeds
    assert (able.tool_call_parser, able.reasoning_parser) == ("qwen", None)


@pytest.mark.parametrize("version", ["0.5.24.dev3+gabc", "0.6.0", "1.0.0rc1", "v0.5.23"])
def test_versions_count_by_their_number(version):
    assert capabilities_of({"version": version}, NEW_ROUTES, "here").version_spans


@pytest.mark.parametrize("info", [{"version": "0.4.10"}, {}, {"version": "main"}])
def test_what_is_too_old_or_unknown_is_refused(info):
    with pytest.raises(EngineError, match=r"here: is SGLang .*\n.*0\.5\.15 or newer"):
        capabilities_of(info, OLD_ROUTES, "here")


def test_what_is_missing_is_an_error_that_names_capability_version_and_remedy():
    of_new().require("weight_sessions", needed_by="x", place="here")
    with pytest.raises(EngineError) as caught:
        of_old().require("routed_experts", needed_by="--use-rollout-routing-replay", place="http://e")
    text = str(caught.value)
    assert (
        "http://e: SGLang 0.5.15.post1 has no routes of experts, which --use-rollout-routing-replay" in text
    )
    assert "remedy: use an engine that is started with --enable-return-routed-experts" in text
    of_new().require_pause("retract", needed_by="--update-pause", place="here")
    with pytest.raises(EngineError, match=r"no pause 'retract' that is safe(.|\n)*one of abort, in_place"):
        of_old().require_pause("retract", needed_by="--update-pause", place="here")


def test_every_fact_that_can_be_required_has_its_words():
    bare = capabilities_of(OLD, frozenset(), "here")
    for name in ("weight_sessions", "version_spans", "routed_experts", "lora", "checksums", "pulls_weights"):
        with pytest.raises(EngineError, match="remedy: use "):
            bare.require(name, needed_by="x", place="here")


def test_the_probe_asks_for_routes_without_calling_them():
    async def main():
        begin = {("POST", "/begin_weight_update"): {}, ("GET", "/v1/loads"): {}}
        async with server(NEW, begin) as (url, called):
            return await probe(url), called

    able, called = asyncio.run(main())
    assert able.weight_sessions
    assert called == [("GET", "/server_info")]


def test_the_probe_says_why_it_cannot():
    with pytest.raises(EngineUnavailableError):
        asyncio.run(probe("http://127.0.0.1:1"))

    async def main():
        async with server([], {}) as (url, _):
            await probe(url)

    with pytest.raises(EngineError, match="/server_info answered 200"):
        asyncio.run(main())


def test_an_engine_of_ours_can_what_the_newest_can():
    with scripted() as engine:
        able = asyncio.run(probe(engine.url))
    assert able.engine == "embedded"
    assert able.weight_sessions and able.version_spans and able.repeats_seeds
    assert able.pauses == {"abort", "in_place", "retract"}


def test_the_client_asks_an_older_server_in_its_own_way():
    async def main():
        async with server(OLD, OLD_SERVER) as (url, called):
            client = EngineClient(url)
            await client.begin_weight_update()
            await client.end_weight_update()
            return await client.loads(), called

    loads, called = asyncio.run(main())
    expected = {"dp_rank": 0, "num_running_reqs": 3, "num_waiting_reqs": 2, "num_used_tokens": 70}
    assert loads == [expected]
    assert called.count(("GET", "/server_info")) == 1
    assert not [path for method, path in called if "weight" in path]

"""Servers that others started are found out about, checked, and left as they are."""

import asyncio
import contextlib

import pytest
from aiohttp import web

from slime.errors import ConfigError, EngineUnavailableError
from slime.serving.external import Expected, discover, url_of
from tests.rollout.kit import raw_server, scripted


@contextlib.contextmanager
def stand_ins(*infos):
    """Servers with these answers to /server_info; yields their addresses."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(_stand_in(info)) for info in infos]


@contextlib.contextmanager
def _stand_in(info, path="/server_info"):
    from slime.agent.aiohttp_threaded import run_app_in_thread

    async def answer(request):
        return web.json_response(info)

    app = web.Application()
    app.router.add_get(path, answer)
    handle = run_app_in_thread(app, host="127.0.0.1")
    try:
        yield f"127.0.0.1:{handle.port}"
    finally:
        handle.stop()


def test_an_engine_of_ours_is_found_and_left_alone():
    with scripted() as server:
        address = server.url.removeprefix("http://")
        (engine,) = discover([address], Expected(model_path="models/actor"))
        assert server.engine.events == []
    endpoint = engine.endpoint
    assert (endpoint.name, endpoint.url, endpoint.kind) == ("default/external-0", server.url, "embedded")
    assert (endpoint.is_external, endpoint.updates_weights, endpoint.world_size) == (True, True, 1)


def test_role_size_and_bootstrap_port_are_what_the_server_says():
    prefill = {
        "disaggregation_mode": "prefill",
        "disaggregation_bootstrap_port": 9001,
        "tp_size": 4,
        "pp_size": 2,
    }
    decode = {"disaggregation_mode": "decode", "disaggregation_bootstrap_port": 9001, "tp_size": 2}
    with stand_ins(prefill, decode) as addresses:
        one, two = discover(addresses, Expected(num_gpus=10))
    assert (one.endpoint.worker_type, one.endpoint.world_size, one.bootstrap_port) == ("prefill", 8, 9001)
    assert (two.endpoint.worker_type, two.endpoint.world_size, two.bootstrap_port) == ("decode", 2, None)
    assert one.endpoint.kind == "sglang"


def test_the_older_path_is_asked_too():
    with _stand_in({"tp_size": 2}, "/get_server_info") as address:
        assert discover([address], Expected())[0].endpoint.world_size == 2


def test_all_that_does_not_fit_is_told_together():
    infos = [
        {"is_embedding": True, "skip_tokenizer_init": True, "context_length": 100},
        {"disaggregation_mode": "prefill", "mem_fraction_static": 0.5, "model_path": "models/other"},
        {"disaggregation_mode": "strange", "weight_version": "7"},
    ]
    expected = Expected(
        model_path="models/actor",
        context_length=200,
        settings={"mem_fraction_static": 0.8, "unknown_there": 1},
        num_gpus=8,
        takes_weights=False,
    )
    with stand_ins(*infos) as addresses, pytest.raises(ConfigError) as caught:
        discover(addresses, expected)
    told = str(caught.value)
    for message in (
        "serves embeddings",
        "has no tokenizer",
        "its context_length is 100, the run's longest 200 tokens",
        "its mem_fraction_static is 0.5, and --sglang-mem-fraction-static says 0.8",
        "serves 'models/other', not 'models/actor'",
        "its disaggregation_mode is 'strange'",
        "--rollout-num-gpus: is 8; these servers have 3",
        "names servers that are prefill, regular",
        "weight versions differ: 7, default",
    ):
        assert message in told
    assert "unknown_there" not in told
    assert told.count(addresses[0]) == 3


def test_a_server_that_takes_our_weights_may_have_begun_with_others():
    with stand_ins({"model_path": "models/other", "weight_version": "7"}, {}) as addresses:
        assert len(discover(addresses, Expected(model_path="models/actor"))) == 2


def test_servers_that_take_weights_in_different_ways_are_refused_where_they_shall_take_any():
    with stand_ins({"engine": "slime-embedded"}, {}) as addresses:
        with pytest.raises(ConfigError, match="of the kinds embedded and sglang"):
            discover(addresses, Expected())
        assert len(discover(addresses, Expected(takes_weights=False))) == 2


def test_a_server_that_does_not_answer_is_named():
    with scripted() as server:
        pass
    with pytest.raises(EngineUnavailableError, match=f"{server.url}: is no engine that answers"):
        discover([server.url], Expected(), timeout=2.0)


def test_what_is_no_engine_is_named():
    async def main():
        async def hello(request):
            return web.Response(text="hello")

        async with raw_server(hello, "/server_info") as url:
            with pytest.raises(EngineUnavailableError, match="/server_info: "):
                await asyncio.to_thread(discover, [url], Expected(), timeout=2.0)

    asyncio.run(main())


@pytest.mark.parametrize(
    "address", ["host", "host:port", "https://host:1", "http://host", "host:1/path", ":1", "host:99999"]
)
def test_an_address_that_is_none_is_refused(address):
    with pytest.raises(ConfigError, match="--rollout-external-engine-addrs: expects host:port"):
        url_of(address)


def test_addresses_are_urls_and_stand_once():
    assert url_of("host:1") == url_of("http://host:1/") == "http://host:1"
    assert url_of("[::1]:7") == "http://[::1]:7"
    with pytest.raises(ConfigError, match="names http://host:1 twice"):
        discover(["host:1", "http://host:1"], Expected())

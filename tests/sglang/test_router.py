"""sglang-router: the suite of all routers, what it makes of bodies, prefill and decode."""

import asyncio
import contextlib
import functools
import json
import urllib.request

import pytest
from aiohttp import web

from slime.agent.adapters.model import SAMPLING_DEFAULTS
from slime.agent.aiohttp_threaded import run_app_in_thread
from slime.config.serving_sections import ServingConfig
from slime.errors import ConfigError
from slime.rollout.state import base_sampling_params
from slime.serving.router import plan_router, start_router
from slime.serving.router_client import Registration
from slime.serving.topology import single_model
from slime.utils.engine_client import EngineClient
from slime.utils.router_bodies import KEPT_FIELDS, KEPT_SAMPLING_PARAMS, lost_fields
from tests.serving import routing
from tests.serving.router_suite import *  # noqa: F403
from tests.serving.routing import MODEL, engines
from tests.sglang.install import PYTHON

pytestmark = pytest.mark.slow
SAMPLING_VALUES = {
    **dict.fromkeys(("ebnf", "json_schema", "regex"), "a"),
    **dict.fromkeys(("ignore_eos", "no_stop_trim", "skip_special_tokens"), True),
    **dict.fromkeys(("max_new_tokens", "min_new_tokens", "n", "top_k", "sampling_seed"), 7),
    **dict.fromkeys(("min_p", "top_p", "temperature"), 0.5),
    **dict.fromkeys(("frequency_penalty", "presence_penalty", "repetition_penalty"), 0.5),
    "stop": ["x"],
    "stop_token_ids": [3],
}
VALUES = {
    **{name: ["image"] for name in ("audio_data", "image_data", "video_data", "modalities")},
    **dict.fromkeys(("conversation_id", "custom_logit_processor", "extra_key", "lora_path", "model"), "x"),
    **dict.fromkeys(("rid", "bootstrap_host"), "x"),
    **dict.fromkeys(("bootstrap_port", "bootstrap_room", "data_parallel_rank", "logprob_start_len"), 7),
    **dict.fromkeys(("priority", "top_logprobs_num"), 7),
    **dict.fromkeys(("background", "no_logs", "return_bytes", "return_entropy", "stream"), True),
    **dict.fromkeys(("return_hidden_states", "return_logprob", "return_text_in_logprobs"), True),
    "log_metrics": False,
    "custom_labels": {"a": "b"},
    "session_params": {"id": "s"},
    "token_ids_logprob": [3],
    "text": "hello",
    "input_ids": [1, 2],
    "sampling_params": {"max_new_tokens": 3},
}


@pytest.fixture
def start(tmp_path):
    return functools.partial(
        routing.router, tmp_path / "router.log", engine="sglang", python=str(PYTHON), fault_tolerance=True
    )


@contextlib.contextmanager
def echo():
    """A worker that answers with what it got."""

    async def generate(request):
        body = await request.json()
        meta = {"output_token_logprobs": [[-0.5, 70, None]], "finish_reason": {"type": "stop"}}
        return web.json_response({"text": "", "output_ids": [70], "meta_info": meta, "got": body})

    async def anything(request):
        known = request.path in ("/health", "/server_info", "/model_info", "/get_model_info")
        return web.json_response({"model_path": "m"} if known else {}, status=200 if known else 404)

    app = web.Application()
    app.router.add_post("/generate", generate)
    app.router.add_route("*", "/{rest:.*}", anything)
    handle = run_app_in_thread(app, host="127.0.0.1")
    try:
        yield f"http://127.0.0.1:{handle.port}"
    finally:
        handle.stop()


def got(url, body):
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url + "/generate", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=20) as answer:
        return json.load(answer)["got"]


def test_the_table_of_what_it_keeps_of_a_body_is_true(start):
    assert set(VALUES) == KEPT_FIELDS
    assert set(SAMPLING_VALUES) == KEPT_SAMPLING_PARAMS
    unknown = {"return_routed_experts": True, "unknown": 1}
    with echo() as worker, start() as router:
        router.client.add(worker)
        for name, value in VALUES.items():
            whole = {"input_ids": [1]} if name not in ("text", "input_ids", "stream") else {}
            body = whole | ({"input_ids": [1]} if name == "stream" else {}) | {name: value}
            assert got(router.url, body)[name] == value, name
        for name, value in SAMPLING_VALUES.items():
            body = {"input_ids": [1], "sampling_params": {name: value}}
            assert got(router.url, body)["sampling_params"][name] == value, name
        lost = got(router.url, {"input_ids": [1], "sampling_params": {"custom_params": {"a": 1}}} | unknown)
        assert "custom_params" not in lost["sampling_params"]
        assert not set(unknown) & set(lost)


def test_what_rollouts_and_agents_send_by_default_passes_it():
    args = {"rollout_temperature": 1.0, "rollout_top_p": 0.9, "rollout_top_k": 5, "rollout_stop": ["x"]}
    rollouts = base_sampling_params(type("Args", (), args))
    for params in (rollouts, dict(SAMPLING_DEFAULTS), rollouts | {"sampling_seed": 7}):
        body = {
            "rid": "r",
            "input_ids": [1],
            "sampling_params": params,
            "return_logprob": True,
            "stream": True,
        }
        assert lost_fields(body) == []
    assert lost_fields({"return_routed_experts": True}) == ["return_routed_experts"]
    assert lost_fields({"sampling_params": {"custom_params": {}}}) == ["sampling_params.custom_params"]


def test_what_it_would_lose_reaches_the_worker_all_the_same(start):
    async def main(url):
        client = EngineClient(url)
        return await client.generate([1], {}, routing_key="s", timeout=20.0, return_routed_experts=True)

    with engines(2) as servers, start(servers) as router:
        asyncio.run(main(router.url))
        assert sum(len(server.engine.calls) for server in servers) == 1


@pytest.mark.parametrize("policy", ["cache_aware", "consistent_hashing", "power_of_two"])
def test_prefill_and_decode_get_the_same_request_and_the_room_where_they_meet(tmp_path, policy):
    model = single_model("models/actor", num_gpus=3, prefill_engines=1).default
    serving = ServingConfig(sglang_python=str(PYTHON))
    plan = plan_router(model, serving, {"policy": policy}, engine="sglang")
    with engines(3) as (prefill, *decoding):
        workers = [Registration(url=prefill.url, worker_type="prefill", bootstrap_port=9001)]
        workers += [Registration(url=server.url, worker_type="decode") for server in decoding]
        router = start_router(plan, tmp_path / "router.log", workers=workers)
        try:
            listed = {worker.url: worker.worker_type for worker in router.client.workers()}
            assert listed == {prefill.url: "prefill"} | dict.fromkeys((one.url for one in decoding), "decode")
            keys = [f"s{n}" for n in range(6)]
            routing.ask_all(router.url, keys)
            assert {call.rid for call in prefill.engine.calls} == {f"r{n}" for n in range(6)}
            assert set(routing.places(decoding, keys)) <= {0, 1}
        finally:
            router.stop()


def test_a_setting_that_this_version_lacks_is_told(tmp_path):
    plan = plan_router(MODEL, ServingConfig(sglang_python=str(PYTHON)), {"no_such": 1}, engine="sglang")
    with pytest.raises(Exception, match="this sglang-router has no settings no_such"):
        start_router(plan, tmp_path / "router.log")


def test_the_router_of_slime_is_not_taken_where_this_one_is():
    plan = plan_router(MODEL, ServingConfig(sglang_python=str(PYTHON)), {}, engine="embedded")
    assert (plan.kind, plan.policy) == ("sglang", "cache_aware")
    assert plan.settings["disable_health_check"] is True
    with pytest.raises(ConfigError, match="not installed"):
        model = single_model("m", num_gpus=2, prefill_engines=1).default
        plan_router(model, ServingConfig(), {}, engine="embedded")

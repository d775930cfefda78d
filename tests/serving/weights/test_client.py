"""What of an update reaches a draft model: nothing, if it is a model of its own."""

import asyncio
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from slime.errors import CapabilityError, EngineError
from slime.serving.endpoint import EngineEndpoint
from slime.serving.weights.client import FROM_DISK, Deadline, WeightClient
from slime.serving.weights.crew import Crew

UPDATE, BEGIN = "/update_weights_from_tensor", "/begin_weight_update"
DRAFTED = {"model_path": "policy", "speculative_algorithm": "EAGLE3"}


@asynccontextmanager
async def server(info, routes):
    bodies = {}

    async def take(request):
        bodies[request.path] = await request.json()
        return web.json_response({"success": True})

    async def tell(_):
        return web.json_response(info)

    app = web.Application()
    app.router.add_get("/server_info", tell)
    for route in routes:
        app.router.add_post(route, take)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}", bodies
    finally:
        await runner.cleanup()


def posted(path, version="0.5.23", **info):
    """The body in which weights arrive at such an engine."""

    async def main():
        routes = [UPDATE, FROM_DISK] + ([BEGIN] if version == "0.5.23" else [])
        async with server({"version": version, **info}, routes) as (url, bodies):
            client = WeightClient(EngineEndpoint(name="e", url=url, kind="sglang"), Deadline(20.0, "a test"))
            await asyncio.to_thread(client.post_weights, path, {"a": 1})
            return bodies[path]

    return asyncio.run(main())


def test_a_draft_model_of_its_own_keeps_its_weights():
    own = DRAFTED | {"speculative_draft_model_path": "draft"}
    assert posted(UPDATE, **own) == {"a": 1, "selector": "target"}
    assert posted(BEGIN, **own) == {"a": 1, "selector": "target"}
    assert posted(UPDATE, "0.5.15.post1", **own) == {"a": 1, "disable_draft_model": True}
    with pytest.raises(EngineError, match=r"into the draft model too(.|\n)*--update-weight-transport tensor"):
        posted(FROM_DISK, **own)


def test_what_no_restart_gives_an_engine_does_not_count_as_its_death():
    async def main():
        async with server({"version": "0.5.15.post1"}, ["/pause_generation"]) as (url, bodies):
            endpoint = EngineEndpoint(name="e", url=url, kind="sglang")
            crew = Crew([endpoint], Deadline(20.0, "a test"))
            with pytest.raises(CapabilityError, match=r"no pause 'retract'(.|\n)*--update-in-flight wait"):
                await asyncio.to_thread(crew.each, "pause", lambda engine: engine.pause("retract"))
            assert crew.failed == {} and bodies == {}
            await asyncio.to_thread(crew.each, "pause", lambda engine: engine.pause("abort"))
            assert bodies == {"/pause_generation": {"mode": "abort"}}

    asyncio.run(main())


@pytest.mark.parametrize("draft", [None, "policy"])
def test_draft_layers_inside_the_policy_get_its_weights(draft):
    for path in (UPDATE, FROM_DISK):
        assert posted(path, **DRAFTED, speculative_draft_model_path=draft) == {"a": 1}
    assert posted(UPDATE) == {"a": 1}

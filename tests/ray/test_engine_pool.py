"""A pool of engines: who is asked, who is watched, and who is not any more."""

import asyncio
import time

import pytest

from slime.config.serving_sections import ServingConfig
from slime.ray.engine_pool import EnginePool
from slime.serving.engine_specs import plan_engines
from slime.serving.external import Expected, discover
from slime.serving.launch import LaunchSettings, Stand
from slime.serving.router_client import RouterClient
from slime.serving.topology import single_model
from slime.utils.engine_client import EngineClient
from tests.ray.routing import routers, url_of
from tests.serving.engines import scripted_server
from tests.serving.routing import engine


class Notes:
    """What a pool needs of a run that starts no engine."""

    def __init__(self):
        self.told = []

    def wait_all(self, name, calls):
        assert not calls
        return []

    def note(self, text):
        self.told.append(text)


@pytest.fixture
def pooled(tmp_path):
    """Makes pools of engines that run already, with what they tell, and ends their watch."""
    pools = []

    def make(servers, routers=None):
        serving = ServingConfig(
            use_fault_tolerance=True, rollout_health_check_interval=0.05, rollout_health_check_timeout=5.0
        )
        found = discover([server.url for server in servers], Expected())
        settings, notes = LaunchSettings(kind="embedded", log_dir=tmp_path), Notes()
        pools.append(EnginePool(serving, settings, (), notes, routers, externals=found, replaces=True))
        return pools[-1], notes.told

    yield make
    for pool in pools:
        pool.stop_watching()


def test_engines_that_no_update_wakes_are_asked_whether_they_generate(pooled):
    with engine() as one, scripted_server() as two:  # which says at once that it does not generate
        pool, told = pooled([one, two])
        asyncio.run(EngineClient(two.url).pause("in_place"))
        pool.finish_start(awaits_weights=False)
        end = time.monotonic() + 20
        while not told and time.monotonic() < end:
            pool.poll()
            time.sleep(0.01)
        assert "external-1 generates no token" in told[0]
        assert [endpoint.url for endpoint in pool.endpoints] == [one.url]


def test_an_engine_that_is_lost_before_it_joins_does_not(pooled, tmp_path):
    with engine() as one, engine() as two, routers(tmp_path, engines=2, restarts=1) as before:
        pool, _ = pooled([one, two], before)
        pool.finish_start()
        fresh = pool.endpoints[1]
        pool.lose(fresh.name, "it died")
        pool.join(fresh)
        assert [worker.url for worker in RouterClient(url_of(before)).workers()] == [one.url]


def test_what_replaces_an_engine_that_its_router_may_wait_for_listens_elsewhere(tmp_path):
    with engine() as one, engine() as gone, routers(tmp_path, engines=2, restarts=1) as before:
        specs = plan_engines(single_model("models/actor", num_gpus=2))
        settings, notes = LaunchSettings(kind="embedded", log_dir=tmp_path), Notes()
        pool = EnginePool(ServingConfig(), settings, specs, notes, before, replaces=True)
        for spec, server in zip(specs, (one, gone), strict=True):
            ours = pool._engines[spec.name]
            ours.endpoint, ours.stands = spec.endpoint(server.url, "embedded"), [Stand(port=1)]
        before.start()
        fresh = pool.endpoints[1]
        gone.stop()
        pool.join(fresh)
        assert pool.lost == (fresh.name,)
        assert "nothing listens there any more" in notes.told[0]
        assert [engine.stands for engine in pool._engines.values()] == [[Stand(port=1)], []]

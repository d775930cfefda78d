"""Who is asked at the address of a model while its engines, and its router, are lost and replaced."""

import os
import signal
import urllib.error

import pytest

from slime.config import load_config
from slime.ray.routers import Routers
from slime.serving.endpoint import EngineEndpoint
from slime.serving.topology import single_model
from tests.serving.routing import ask, engine


@pytest.fixture
def routers(tmp_path):
    """Makes the routers of a run whose only model has so many engines."""
    made = []
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "data.jsonl").write_text('{"input": "1+1", "label": "2"}\n')
    words = ["--hf-checkpoint", str(tmp_path), "--prompt-data", str(tmp_path / "data.jsonl")]
    words += ["--rm-type", "math", "--label-key", "label", "--num-rollout", "1", "--rollout-batch-size", "1"]
    words += ["--rollout-max-response-len", "16", "--n-samples-per-prompt", "2"]

    def make(engines, restarts):
        config = load_config([*words, *(["--use-fault-tolerance"] if restarts is not None else [])])
        topology = single_model("models/actor", num_gpus=engines)
        made.append(Routers(config, topology, "embedded", tmp_path, host=None, restarts=restarts))
        return made[-1]

    yield make
    for one in made:
        one.close()


def endpoint(server, name="default/regular-0"):
    return EngineEndpoint(name=name, url=server.url, kind="embedded")


def url_of(routers):
    host, port = routers.addresses()["default"]
    return f"http://{host}:{port}"


def test_the_only_engine_is_not_asked_before_it_joins_again(routers):
    found = routers(engines=1, restarts=1)
    with engine() as first:
        found.add(endpoint(first))
        found.start()
        assert ask(url_of(found))["output_ids"]
        found.remove(endpoint(first))
        port = int(first.url.rpartition(":")[2])
    with engine(port=port) as second:  # it listens where the first did, with the weights of its folder
        with pytest.raises(urllib.error.HTTPError, match="503"):
            ask(url_of(found))
        found.add(endpoint(second))
        assert ask(url_of(found))["output_ids"]


def test_an_engine_that_is_never_replaced_is_asked_itself(routers):
    found = routers(engines=1, restarts=None)
    with engine() as only:
        found.add(endpoint(only))
        found.start()
        assert url_of(found) == only.url


def test_an_engine_is_lost_while_its_router_is_dead_and_the_next_router_knows(routers):
    found = routers(engines=2, restarts=1)
    with engine() as one, engine() as two:
        found.add(endpoint(one))
        found.add(endpoint(two, "default/regular-1"))
        found.start()
        process = found._processes["default"]
        os.kill(process.pid, signal.SIGKILL)
        process.wait_for_exit()
        found.remove(endpoint(one))
        (text,) = found.poll()
        assert "died and was started again" in text
        assert [worker.url for worker in process.client.workers()] == [two.url]

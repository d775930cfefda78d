"""Who is asked at the address of a model while its engines, and its router, are lost and replaced."""

import contextlib
import os
import signal
import urllib.error
from dataclasses import replace

import pytest

from slime.serving.endpoint import EngineEndpoint
from tests.ray.routing import routers, url_of
from tests.serving.routing import ask, background_router, engine


def endpoint(server, name="default/regular-0"):
    return EngineEndpoint(name=name, url=server.url, kind="embedded")


def test_the_only_engine_is_not_asked_before_it_joins_again(tmp_path):
    with routers(tmp_path, engines=1, restarts=1) as found:
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


def test_an_engine_that_is_never_replaced_is_asked_itself(tmp_path):
    with routers(tmp_path, engines=1, restarts=None) as found, engine() as only:
        found.add(endpoint(only))
        found.start()
        assert url_of(found) == only.url


def test_engines_come_and_go_while_their_router_is_dead_and_the_next_router_knows(tmp_path):
    with routers(tmp_path, engines=2, restarts=1) as found, engine() as one, engine() as two:
        found.add(endpoint(one))
        found.start()
        process = found._processes["default"]
        assert not found.has_died
        os.kill(process.pid, signal.SIGKILL)
        process.wait_for_exit()
        assert found.has_died
        found.remove(endpoint(one))
        found.add(endpoint(two, "default/regular-1"))
        (text,) = found.poll()
        assert not found.has_died
        assert "died and was started again" in text
        assert [worker.url for worker in process.client.workers()] == [two.url]


def urls_at(router):
    return {worker.url for worker in router.client.workers()}


def test_a_router_that_was_there_before_keeps_no_engine_of_the_run(tmp_path):
    with engine() as others, engine() as one, engine() as two, background_router([others]) as router:
        with routers(tmp_path, engines=2, restarts=None, router_url=router.url) as found:
            found.start()
            found.add(endpoint(one))
            found.add(endpoint(two, "default/regular-1"))
            assert urls_at(router) == {others.url, one.url, two.url}
            assert found.leave() == []
        assert urls_at(router) == {others.url}


def test_external_engines_leave_a_router_that_did_not_have_them(tmp_path):
    with engine() as known, engine() as new, background_router([known]) as router:
        with routers(tmp_path, engines=0, restarts=None, router_url=router.url) as found:
            for number, server in enumerate((known, new)):
                found.add(replace(endpoint(server, f"external-{number}"), is_external=True))
            found.leave()
        assert urls_at(router) == {known.url}


def test_a_router_that_cannot_be_left_is_told(tmp_path):
    with contextlib.ExitStack() as stack, engine() as one:
        with background_router() as router:
            found = stack.enter_context(routers(tmp_path, engines=1, restarts=None, router_url=router.url))
            found.add(endpoint(one))
        (text,) = found.leave()
        assert f"{router.url} may still list engines of this run: GET /workers" in text

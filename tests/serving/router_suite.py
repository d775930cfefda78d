"""What any router before engines must do; collected once for each router that there is.

A module that imports these tests provides `start`, a function like `routing.router` without its log.
"""

import asyncio
import json
import socket
import urllib.request

import pytest

from slime.errors import DeadlineError, EngineError, EngineUnavailableError
from slime.serving.router import RouterClient
from slime.serving.scripted import ScriptedAnswer
from slime.utils.engine_client import EngineClient
from tests.serving.routing import PROMPT, ask, ask_all, engine, engines, forget, places
from tests.serving.wire import send_and_hang_up, wait_for

PARAMS = {"max_new_tokens": 4, "spaces_between_special_tokens": False}


def test_a_worker_is_there_when_add_returns_and_gone_when_remove_does(start):
    with engines(2) as (one, two), start() as router:
        assert router.client.workers() == ()
        added = router.client.add(one.url)
        assert (added.url, added.is_healthy, added.worker_type) == (one.url, True, "regular")
        assert router.client.add(one.url).id == added.id
        router.client.add(two.url)
        assert {worker.url for worker in router.client.workers()} == {one.url, two.url}
        assert router.client.remove(one.url) is True
        assert [worker.url for worker in router.client.workers()] == [two.url]
        assert router.client.remove(one.url) is False
        assert router.client.health()
    assert not router.client.health()
    assert not router.is_alive


def test_a_worker_that_never_answers_is_named_at_the_deadline(start):
    with socket.create_server(("127.0.0.1", 0)) as mute, start() as router:
        url = f"http://127.0.0.1:{mute.getsockname()[1]}"
        with pytest.raises(DeadlineError, match=f"{url}: the router .* within 0.5 s"):
            router.client.add(url, timeout=0.5)


def test_a_worker_that_is_gone_is_not_waited_for(start):
    with engine() as gone:
        pass
    with start() as router, pytest.raises(EngineUnavailableError, match=f"{gone.url}: nothing listens there"):
        router.client.add(gone.url)


def test_a_router_that_is_not_there_is_unavailable():
    with pytest.raises(EngineUnavailableError, match="GET /workers"):
        RouterClient("http://127.0.0.1:9").workers()


def test_answers_are_those_of_the_engine(start):
    body = {"rid": "a", "return_logprob": True}
    with engines(1) as (one,), start([one]) as router:
        direct, routed = ask(one.url, body), ask(router.url, body)
    for answer in (direct, routed):
        for volatile in (
            "e2e_latency",
            "response_sent_to_client_ts",
            "cached_tokens",
            "cached_tokens_details",
        ):
            del answer["meta_info"][volatile]
    assert routed == direct


def test_a_stream_comes_piece_by_piece(start):
    slow = ScriptedAnswer(token_ids=[70] * 400, token_latency=0.05)
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 400}, "stream": True}
    with engines(1, lambda call: slow) as servers, start(servers) as router:
        data = json.dumps(body).encode()
        request = urllib.request.Request(router.url + "/generate", data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=30) as answer:
            pieces = [answer.readline() for _ in range(3)]
            assert [piece[:7] for piece in pieces] == [b"data: {", b"\n", b"data: {"]
            assert servers[0].engine.stats.running == 1
            servers[0].engine.abort_all()
            assert answer.read().rstrip().endswith(b"data: [DONE]")


def test_round_robin_gives_every_worker_its_share(start):
    keys = [None] * 9
    with engines(3) as servers, start(servers, policy="round_robin") as router:
        ask_all(router.url, keys, at_once=1)
        assert sorted(places(servers, keys)) == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_power_of_two_spares_the_busy_worker(start):
    def slow_at_first(call):
        return ScriptedAnswer(hang=True) if call.rid == "hang" else ScriptedAnswer(text="a")

    with engines(2, slow_at_first) as servers, start(servers, policy="power_of_two") as router:
        keys = [None] * 8
        ask_all(router.url, keys)
        assert set(places(servers, keys)) <= {0, 1}


def test_a_session_stays_on_its_worker(start):
    keys = [f"session-{n % 12}" for n in range(60)]
    with engines(3) as servers, start(servers, policy="consistent_hashing") as router:
        ask_all(router.url, keys)
        by_key = {}
        for key, place in zip(keys, places(servers, keys), strict=True):
            by_key.setdefault(key, set()).add(place)
    assert all(len(where) == 1 for where in by_key.values())
    assert len(set.union(*by_key.values())) > 1


def test_what_a_dead_worker_did_not_answer_another_one_does(start):
    with engines(2) as servers, start(servers, policy="round_robin") as router:
        servers[0].kill()
        servers[0].stop()  # waits until the port is closed
        keys = [None] * 6
        answers = ask_all(router.url, keys)
        assert len(answers) == 6
        assert places(servers, keys) == [1] * 6


def test_a_dead_worker_is_found_out_and_comes_back(start):
    with engines(2) as servers, start(servers, health_check_interval_secs=1) as router:
        port = int(servers[0].url.rsplit(":", 1)[1])
        servers[0].stop()
        wait_for(lambda: healthy(router) == [servers[1].url], 30)
        with engine(port=port) as again:
            wait_for(lambda: set(healthy(router)) == {again.url, servers[1].url}, 30)


def test_sessions_of_a_dead_worker_go_on_at_another(start):
    async def main(url, keys):
        client = EngineClient(url)
        return await asyncio.gather(
            *(client.generate(PROMPT, PARAMS, routing_key=key, timeout=60.0) for key in keys)
        )

    keys = [f"session-{n}" for n in range(12)]
    with engines(2) as servers, start(servers, policy="consistent_hashing") as router:
        ask_all(router.url, keys)
        assert set(places(servers, keys)) == {0, 1}
        servers[0].kill()
        answers = asyncio.run(main(router.url, keys))
        assert [len(answer.output_ids) for answer in answers] == [3] * 12


def healthy(router):
    return [worker.url for worker in router.client.workers() if worker.is_healthy]


def test_without_a_worker_a_request_is_unavailable(start):
    client_of = EngineClient
    with start() as router, pytest.raises(EngineUnavailableError, match="503"):
        asyncio.run(client_of(router.url, retries=1, backoff=0.01).generate(PROMPT, PARAMS, timeout=20.0))


def test_the_engine_client_generates_through_it_and_steers_every_worker(start):
    async def main(client):
        answer = await client.generate(PROMPT, PARAMS, routing_key="s", timeout=20.0)
        await client.pause("in_place")
        await client.resume()
        return answer, await client.workers(), await client.loads()

    with engines(2) as servers, start(servers) as router:
        answer, workers, loads = asyncio.run(main(EngineClient(router.url)))
        assert len(answer.output_ids) == 3
        assert set(workers) == {server.url for server in servers}
        assert len(loads) == 2
        for server in servers:
            assert server.engine.events == ["pause:in_place", "resume"]


def test_an_abort_reaches_the_worker_that_has_the_request(start):
    async def main(client, servers):
        task = asyncio.create_task(client.generate(PROMPT, PARAMS, rid="r1", timeout=20.0))
        while not any(server.engine.calls for server in servers):
            await asyncio.sleep(0.01)
        await client.abort("r1")
        return await task

    with engines(2, lambda call: ScriptedAnswer(hang=True)) as servers, start(servers) as router:
        answer = asyncio.run(main(EngineClient(router.url), servers))
        assert answer.finish_reason == "abort"


def test_a_client_that_goes_away_ends_its_request_at_the_worker(start):
    with engines(1, lambda call: ScriptedAnswer(hang=True)) as (one,), start([one]) as router:
        body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 4}, "rid": "r5", "stream": True}
        send_and_hang_up(router.url, "/generate", body, until=lambda: one.engine.calls)
        wait_for(lambda: "abort:r5" in one.engine.events)


def test_an_error_of_the_engine_comes_back_with_its_words(start):
    with (
        engines(1) as servers,
        start(servers, disable_retries=True) as router,
        pytest.raises(EngineError, match="top_p"),
    ):
        asyncio.run(EngineClient(router.url).generate(PROMPT, {"top_p": 5}, timeout=20.0))


def test_adding_a_worker_moves_only_some_sessions(start):
    keys = [f"s{n}" for n in range(16)]
    with engines(3) as servers, start(servers[:2], policy="consistent_hashing") as router:
        ask_all(router.url, keys)
        before = places(servers, keys)
        forget(servers)
        router.client.add(servers[2].url)
        ask_all(router.url, keys)
        assert before != [2] * 16
        assert set(before) <= {0, 1}
        assert 2 in places(servers, keys)

"""Health of engines: paused is not dead, a failure is told once with its cause, and restarts are counted."""

import asyncio
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime.errors import EngineError
from slime.ray.health import (
    CheckSchedule,
    HealthMonitor,
    HealthTimes,
    HealthWatch,
    RestartBudget,
    ask_engine,
)
from slime.rollout.virtual_time import run_virtually
from slime.serving.endpoint import EngineEndpoint
from slime.serving.scripted import ScriptedAnswer, ScriptedServer, start_scripted_server
from slime.utils.engine_client import EngineClient
from tests.serving.engines import scripted_server
from tests.tiny import tiny_tokenizer

TIMES = HealthTimes(interval=30.0, timeout=10.0, first_wait=5.0)


def engine(name="default/regular-0", url="http://127.0.0.1:1"):
    return EngineEndpoint(name=name, url=url, kind="embedded")


class Engines:
    """Engines in virtual time: what each answers, and what was asked when."""

    def __init__(self, seconds=1.0):
        self.wrong = {}
        self.seconds = seconds
        self.asked = []
        self.failures = []

    async def ask(self, endpoint, question, timeout):
        self.asked.append((round(asyncio.get_running_loop().time(), 3), endpoint.name, question))
        await asyncio.sleep(self.seconds)
        wrong = self.wrong.get(endpoint.name)
        return wrong(question) if callable(wrong) else wrong

    def watch(self, times=TIMES):
        return HealthWatch(self.ask, self.failures.append, times, lambda name: f"log of {name}")

    def times_of(self, question):
        return [at for at, _, asked in self.asked if asked == question]


def played(script, **kwargs):
    engines = Engines(**kwargs)

    async def main():
        watch = engines.watch()
        await script(engines, watch)
        await watch.close()

    run_virtually(main())
    return engines


def test_checks_begin_behind_the_first_wait_and_come_at_their_interval():
    async def script(engines, watch):
        watch.watch(engine())
        await asyncio.sleep(100)
        watch.turn(paused=False)
        await asyncio.sleep(70)

    engines = played(script)
    assert engines.times_of("generates") == [105.0, 136.0, 167.0]
    assert engines.times_of("answers") == [30.0, 61.0, 92.0]
    assert engines.failures == []


def test_a_paused_engine_that_generates_nothing_is_not_dead():
    async def script(engines, watch):
        engines.wrong["default/regular-0"] = lambda question: "503" if question == "generates" else None
        watch.watch(engine())
        await asyncio.sleep(1000)

    assert played(script).failures == []


def test_a_paused_engine_whose_process_does_not_answer_is():
    async def script(engines, watch):
        engines.wrong["default/regular-0"] = "connection refused"
        watch.watch(engine())
        await asyncio.sleep(31.5)

    (failure,) = played(script).failures
    assert (failure.engine, failure.question) == ("default/regular-0", "answers")
    assert str(failure) == (
        "engine default/regular-0 does not answer: connection refused\n"
        "  its log ends:\nlog of default/regular-0"
    )


def test_an_answer_to_a_question_from_before_a_pause_counts_for_nothing():
    async def script(engines, watch):
        engines.wrong["default/regular-0"] = lambda question: "503" if question == "generates" else None
        watch.watch(engine())
        watch.turn(paused=False)
        await asyncio.sleep(6)
        assert engines.times_of("generates") == [5.0]
        watch.turn(paused=True)
        await asyncio.sleep(20)

    assert played(script, seconds=8.0).failures == []


def test_a_failure_is_told_once_and_its_engine_is_asked_again_when_it_is_replaced():
    async def script(engines, watch):
        engines.wrong["default/regular-0"] = "no token"
        watch.watch(engine())
        watch.watch(engine("default/regular-1"))
        watch.turn(paused=False)
        await asyncio.sleep(100)
        assert [failure.engine for failure in engines.failures] == ["default/regular-0"]
        watch.turn(paused=True)
        watch.turn(paused=False)
        await asyncio.sleep(100)
        assert len(engines.failures) == 1
        engines.wrong.clear()
        watch.watch(engine())
        asked = len(engines.asked)
        await asyncio.sleep(1)
        watch.turn(paused=False)
        await asyncio.sleep(100)
        assert len([name for _, name, _ in engines.asked[asked:] if name == "default/regular-0"]) == 4

    assert len(played(script).failures) == 1


def test_who_is_told_cannot_end_the_watch_of_others_and_a_check_that_breaks_has_failed(caplog):
    async def script(engines, watch):
        def breaks(failure):
            engines.failures.append(failure)
            raise RuntimeError("told in vain")

        watch = HealthWatch(engines.ask, breaks, TIMES, {"b": "the end"}.__getitem__)

        def broken(question):
            raise ValueError("strange")

        engines.wrong = {"a": broken, "b": "gone"}
        for name in ("a", "b"):
            watch.watch(engine(name))
        watch.turn(paused=False)
        await asyncio.sleep(60)
        await watch.close()

    engines = played(script)
    assert [failure.reason for failure in engines.failures] == [
        "the check broke: ValueError: strange",
        "gone",
    ]
    assert [failure.log for failure in engines.failures] == ["    (not to be had: 'a')", "the end"]
    assert "told in vain" in caplog.text


@given(
    st.floats(0.1, 100),
    st.floats(0, 100),
    st.lists(st.tuples(st.floats(0, 50), st.sampled_from(["pause", "resume", "asked"])), max_size=20),
)
def test_a_paused_engine_is_never_asked_to_generate_and_no_check_comes_too_early(
    interval, first_wait, events
):
    times = HealthTimes(interval=interval, timeout=1.0, first_wait=first_wait)
    now, schedule, asked, resumed = 0.0, CheckSchedule(times, 0.0, paused=False), None, 0.0
    for after, event in events:
        now += after
        if event == "asked":
            schedule.asked(now)
            asked = now
        else:
            schedule.turn(now, paused=event == "pause")
            resumed, asked = now, None
        due, question = schedule.next_check()
        assert question == ("answers" if schedule.paused else "generates")
        assert due >= (resumed + (interval if schedule.paused else first_wait) if asked is None else now)
        assert due <= now + max(interval, first_wait)


def ask(server_url, question, timeout=5.0):
    return asyncio.run(ask_engine(engine(url=server_url), question, timeout))


def test_a_real_engine_that_is_paused_answers_and_does_not_generate():
    with scripted_server() as server:
        wait_until(lambda: ask(server.url, "generates") is None)
        asyncio.run(EngineClient(server.url).pause("in_place"))
        assert "503" in ask(server.url, "generates")
        assert ask(server.url, "answers") is None
    assert "refused" in ask(server.url, "answers").lower() or "Connect" in ask(server.url, "answers")


def stalling(call):
    return ScriptedAnswer(text="late", token_latency=60.0)


@pytest.fixture
def server():
    with start_scripted_server(stalling, tiny_tokenizer()) as server:
        yield server


def wait_until(condition):
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def monitor(server: ScriptedServer, told, **times):
    settings = HealthTimes(**{"interval": 0.05, "timeout": 5.0} | times)
    return HealthMonitor([engine(url=server.url)], told.append, settings, log_tail=lambda name: "    the end")


def test_the_monitor_tells_of_an_engine_that_dies_while_it_is_paused_and_while_it_generates(server):
    for paused in (True, False):
        told = []
        with start_scripted_server(stalling, tiny_tokenizer()) as mortal:
            watching = monitor(mortal, told)
            if not paused:
                watching.resume()
            time.sleep(0.2)
            assert told == []
            mortal.kill()
            wait_until(lambda told=told: told)
            watching.stop()
        assert told[0].question == ("answers" if paused else "generates")
        assert "its log ends:\n    the end" in str(told[0])


def test_the_monitor_goes_quiet_when_it_is_stopped_and_may_be_called_back(server):
    told, threads = [], threading.active_count()

    def forget_it(failure):
        watching.forget(failure.engine)
        told.append(failure)

    with start_scripted_server(stalling, tiny_tokenizer()) as mortal:
        watching = HealthMonitor([engine(url=mortal.url)], forget_it, HealthTimes(interval=0.05, timeout=5.0))
        mortal.kill()
        wait_until(lambda: told)
        watching.watch(engine(url=server.url))
        watching.resume()
        watching.pause()
        watching.stop()
        watching.stop()
        watching.resume()
    assert len(told) == 1
    assert threading.active_count() <= threads


def test_an_engine_has_its_restarts_and_then_every_reason_is_told():
    budget = RestartBudget(2)
    assert budget.take("a", "killed by signal 9") == 1
    assert budget.take("b", "no token") == 1
    assert budget.take("a", "no token") == 0
    assert budget.used == 3
    with pytest.raises(EngineError) as caught:
        budget.take("a", "out of memory")
    text = str(caught.value)
    assert "engine a: failed 3 times, and may be replaced 2 times" in text
    for reason in ("1. killed by signal 9", "2. no token", "3. out of memory"):
        assert reason in text
    assert budget.used == 3


def test_without_restarts_the_first_failure_is_the_last():
    with pytest.raises(EngineError, match=r"(?s)failed 1 times.*1\. gone.*--rollout-engine-restarts"):
        RestartBudget(0).take("a", "gone")

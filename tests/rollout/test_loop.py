import asyncio
import threading

import pytest

from slime.errors import SlimeError
from slime.rollout.loop import BackgroundLoop, background_loop, run_blocking


async def thread_name():
    return threading.current_thread().name


def test_all_work_of_a_process_runs_on_one_loop():
    assert run_blocking(thread_name()) == run_blocking(thread_name()) == "slime-rollout"


def test_errors_reach_the_caller():
    async def fails():
        raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"):
        run_blocking(fails())


def test_a_call_from_the_loop_itself_is_refused():
    async def nested():
        run_blocking(thread_name())

    with pytest.raises(SlimeError, match="inside the rollout event loop"):
        run_blocking(nested())


def test_an_interrupted_caller_cancels_the_work_and_waits_for_its_end(monkeypatch):
    events, started = [], threading.Event()

    async def works():
        started.set()
        try:
            await asyncio.sleep(3600)
        finally:
            await asyncio.sleep(0.01)
            events.append("cleaned up")

    import concurrent.futures

    def interrupted(future, timeout=None):
        started.wait()
        raise KeyboardInterrupt

    loop = background_loop()
    monkeypatch.setattr(concurrent.futures.Future, "result", interrupted)
    with pytest.raises(KeyboardInterrupt):
        loop.run(works())
    assert events == ["cleaned up"]


def test_stopping_finishes_what_is_suspended():
    loop, events = BackgroundLoop("test-loop"), []

    async def generator():
        try:
            yield 1
        finally:
            events.append("closed")

    held = generator()

    async def use():
        return await anext(held)

    assert loop.run(use()) == 1
    loop.stop()
    assert events == ["closed"]


def test_another_thread_cancels_what_runs_and_waits_for_its_end():
    events, started = [], threading.Event()
    loop = BackgroundLoop("test")

    async def works():
        started.set()
        try:
            await asyncio.sleep(3600)
        finally:
            await asyncio.sleep(0.05)
            events.append("cleaned up")

    def caller():
        with pytest.raises(asyncio.CancelledError):
            loop.run(works())
        events.append("told")

    thread = threading.Thread(target=caller)
    thread.start()
    started.wait()
    loop.cancel()
    assert events[0] == "cleaned up"
    thread.join()
    assert events == ["cleaned up", "told"]
    loop.stop()

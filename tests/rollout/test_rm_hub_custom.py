import asyncio
import time
import types

import pytest

from slime.errors import RewardError
from slime.rollout.rm_hub import Failed, Invalid, Valid, async_rm, batched_async_rm, verdict_on
from slime.rollout.rm_hub.custom import _ThreadCall
from slime.utils.types import Sample
from tests.rollout.test_hooks import HERE


def args_of(name, **values):
    return types.SimpleNamespace(custom_rm_path=HERE + name, **values)


def test_a_plain_function_runs_on_a_thread_of_its_own():
    sample = Sample()
    assert asyncio.run(async_rm(args_of("reward_sync"), sample)) == 1.0
    assert sample.metadata["thread"] == "slime-hook"


@pytest.mark.parametrize(("name", "value"), [("reward_sync_async", 0.5), ("reward_object", 0.75)])
def test_what_gives_a_coroutine_is_awaited(name, value):
    assert asyncio.run(async_rm(args_of(name), Sample())) == value


def test_a_plain_function_may_reward_a_group():
    samples = [Sample(index=0), Sample(index=1)]
    args = args_of("reward_sync_group", group_rm=True)
    assert asyncio.run(batched_async_rm(args, samples)) == [0.25, 0.25]


@pytest.mark.parametrize(
    ("name", "reason"), [("reward_sync_raises", "KeyError"), ("reward_sync_exits", "SystemExit")]
)
def test_a_plain_function_that_raises_is_a_failed_verdict(name, reason):
    verdict = asyncio.run(verdict_on(args_of(name), Sample(index=4)))
    assert isinstance(verdict, Failed)
    assert verdict.reason == reason
    assert "sample 4" in str(verdict.error)


@pytest.mark.parametrize("name", ["reward_sync_spins", "reward_sync_sleeps"])
def test_a_plain_function_that_hangs_is_reported_while_the_loop_goes_on(name):
    async def main():
        hung = asyncio.create_task(verdict_on(args_of(name, reward_timeout=0.3), Sample(index=4)))
        ticks = 0
        while not hung.done():
            await asyncio.sleep(0.01)
            ticks += 1
        return hung.result(), ticks

    verdict, ticks = asyncio.run(main())
    assert isinstance(verdict, Failed)
    assert verdict.reason == "timeout"
    assert "did not finish within 0.3 s" in str(verdict.error)
    assert ticks > 1


def test_the_thread_of_a_hung_function_is_stopped():
    sample = Sample()
    with pytest.raises(RewardError, match="did not finish"):
        asyncio.run(async_rm(args_of("reward_sync_spins", reward_timeout=0.2), sample))
    for _ in range(500):
        if not sample.metadata.get("spins"):
            return
        time.sleep(0.01)
    raise AssertionError("the thread runs on")


def test_a_function_that_is_stopped_before_its_thread_begins_is_not_called():
    called = []
    call = _ThreadCall(lambda: called.append(1), (), {})
    call.stop()
    call.run()
    assert called == []


def test_a_hook_may_say_that_there_was_no_answer():
    verdict = asyncio.run(verdict_on(args_of("reward_no_answer"), Sample()))
    assert verdict == Invalid(-1.0, "gave_up")
    assert asyncio.run(async_rm(args_of("reward_no_answer"), Sample())) == -1.0
    assert asyncio.run(verdict_on(args_of("reward_half"), Sample())) == Valid(0.5)
    broken = asyncio.run(verdict_on(args_of("reward_nan_no_answer"), Sample()))
    assert isinstance(broken, Failed)
    assert broken.reason == "no_number"

import asyncio

import pytest

from slime.errors import DeadlineError, HookError
from slime.rollout.tasks import abandoned_work, all_of, bounded
from tests.rollout.kit import until


def run(work, **options):
    return asyncio.run(bounded(work, **{"seconds": 20.0, "what": "work", "place": "rollout 3"} | options))


async def value():
    return 5


def test_the_value_comes_through():
    assert run(value()) == 5


def test_an_error_comes_through():
    async def fails():
        raise KeyError("inner")

    with pytest.raises(KeyError, match="inner"):
        run(fails())


def test_past_the_deadline_it_is_cancelled_and_named():
    seen = []

    async def hangs():
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            seen.append("cancelled")
            raise

    with pytest.raises(DeadlineError, match=r"rollout 3: work took longer than 0.01 s and was cancelled"):
        run(hangs(), seconds=0.01)
    assert seen == ["cancelled"]


def test_work_that_ignores_cancellation_is_left_behind_and_listed():
    async def main():
        release = asyncio.Event()

        async def stubborn():
            while not release.is_set():
                try:
                    await release.wait()
                except asyncio.CancelledError:
                    continue

        with pytest.raises(DeadlineError, match="ignores"):
            await bounded(stubborn(), seconds=0.01, what="hook", place="rollout 3", grace=0.01)
        assert abandoned_work() == ["hook, rollout 3"]
        release.set()
        await until(lambda: abandoned_work() == [])

    asyncio.run(main())


def test_a_cancellation_that_nobody_asked_for_is_an_error():
    async def leaks():
        raise asyncio.CancelledError

    with pytest.raises(HookError, match="nobody cancelled it"):
        run(leaks())


def test_an_exit_does_not_end_the_process():
    async def exits():
        raise SystemExit(3)

    with pytest.raises(HookError, match="SystemExit"):
        run(exits())


def test_the_owners_cancellation_reaches_the_work():
    async def main():
        started, ended = asyncio.Event(), []

        async def works():
            try:
                started.set()
                await asyncio.sleep(3600)
            finally:
                ended.append(True)

        task = asyncio.create_task(bounded(works(), seconds=20.0, what="work", place="rollout 3"))
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ended == [True]

    asyncio.run(main())


def test_work_that_is_being_ended_keeps_its_grace_when_the_owner_is_cancelled_too():
    async def main():
        ending, ended = asyncio.Event(), []

        async def slow_to_end():
            try:
                await asyncio.sleep(3600)
            finally:
                ending.set()
                await asyncio.sleep(0.05)
                ended.append(True)

        task = asyncio.create_task(bounded(slow_to_end(), seconds=0.01, what="work", place="rollout 3"))
        await ending.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ended == [True]
        assert abandoned_work() == []

    asyncio.run(main())


def test_all_of_leaves_nothing_running_after_an_error():
    async def main():
        ended = []

        async def waits():
            try:
                await asyncio.sleep(3600)
            finally:
                ended.append(True)

        async def fails():
            raise ValueError("first")

        with pytest.raises(ValueError, match="first"):
            await all_of([waits(), fails(), waits()])
        assert len(ended) == 2

    asyncio.run(main())

import asyncio
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from slime.errors import RewardError
from slime.rollout.rm_hub import Invalid
from slime.rollout.rm_hub.pool import RewardPool, close_shared_pools, shared_pool

HERE = "tests.rollout.checks_for_tests."


@pytest.fixture(scope="module")
def pool():
    pool = RewardPool(2)
    yield pool
    pool.close()


def check(pool, name, *arguments, timeout_s=30.0):
    return pool.run(HERE + name, arguments, timeout_s=timeout_s, place="sample 5")


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_dead(pid):
    for _ in range(600):
        if not alive(pid):
            return
        time.sleep(0.05)
    raise AssertionError(f"process {pid} lives on")


def test_value_comes_from_another_process(pool):
    assert asyncio.run(check(pool, "add", "a", "b")) == "ab"
    assert asyncio.run(check(pool, "own_pid")) != os.getpid()


@pytest.mark.parametrize(
    "name, reason, message",
    [
        ("fail", "ValueError", "raised ValueError: no verdict"),
        ("crash", "crash", r"lost its process \(exit status 3\): last words"),
        ("killed", "crash", "killed from outside by SIGKILL"),
        ("undecided", "odd", "cannot tell"),
        ("absent", "AttributeError", "has no attribute 'absent'"),
        ("not_json", "TypeError", "raised TypeError"),
        ("take_memory", "MemoryError", "raised MemoryError"),
    ],
)
def test_check_that_breaks_is_an_error_that_names_check_and_sample(pool, name, reason, message):
    with pytest.raises(RewardError, match=message) as caught:
        asyncio.run(check(pool, name))
    assert caught.value.place == "sample 5"
    assert caught.value.reason == reason
    assert HERE + name in str(caught.value)
    assert asyncio.run(check(pool, "add", 1, 2)) == 3


def test_what_is_no_answer_keeps_its_reason_and_what_it_scores(pool):
    assert asyncio.run(check(pool, "unanswered")) == Invalid(-1.0, "no_answer")


def test_the_kernel_kills_a_worker_before_anything_else(pool):
    pid = asyncio.run(check(pool, "own_pid"))
    assert Path(f"/proc/{pid}/oom_score_adj").read_text().strip() == "1000"


def test_hung_check_is_killed_and_others_are_unaffected(pool):
    async def main():
        ticks = 0

        async def tick():
            nonlocal ticks
            while True:
                await asyncio.sleep(0.01)
                ticks += 1

        ticking = asyncio.create_task(tick())
        hung = asyncio.create_task(check(pool, "hang", timeout_s=0.5))
        others = await asyncio.gather(*(check(pool, "add", n, 1) for n in range(20)))
        with pytest.raises(RewardError, match=r"did not finish within 0\.5 s; its process was killed"):
            await hung
        ticking.cancel()
        return others, ticks

    others, ticks = asyncio.run(main())
    assert others == list(range(1, 21))
    assert ticks > 1
    assert len(pool.process_ids) <= 2
    assert all(alive(pid) for pid in pool.process_ids)


def test_what_a_check_prints_is_not_taken_as_an_answer(pool):
    assert asyncio.run(check(pool, "chatter")) == 1
    assert asyncio.run(check(pool, "add", 1, 1)) == 2


def test_large_texts_pass(pool):
    text = "x" * 3_000_000
    assert asyncio.run(check(pool, "add", text, "y")) == text + "y"


def test_several_event_loops_share_a_pool(pool):
    results = []
    threads = [
        threading.Thread(target=lambda n=n: results.append(asyncio.run(check(pool, "add", n, 0))))
        for n in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == [0, 1, 2, 3]


def test_cancelled_wait_is_dropped_before_it_starts():
    pool = RewardPool(1)

    async def main():
        first = asyncio.create_task(check(pool, "sleep", 0.5))
        waiting = asyncio.create_task(check(pool, "hang"))
        await asyncio.sleep(0)
        waiting.cancel()
        assert await first == 0.5
        assert await check(pool, "add", 1, 1) == 2

    asyncio.run(main())
    pool.close()


def test_close_kills_and_fails_what_runs_and_waits():
    pool = RewardPool(1)

    async def main():
        await check(pool, "add", 1, 1)
        (pid,) = pool.process_ids
        jobs = [asyncio.create_task(check(pool, "hang")) for _ in range(2)]
        await asyncio.sleep(0.1)
        await asyncio.to_thread(pool.close)
        results = await asyncio.gather(*jobs, return_exceptions=True)
        return pid, results

    pid, results = asyncio.run(main())
    assert all(isinstance(result, RewardError) and "closed" in str(result) for result in results)
    wait_until_dead(pid)
    assert pool.process_ids == []
    with pytest.raises(RewardError, match="closed"):
        asyncio.run(check(pool, "add", 1, 1))


def test_nothing_starts_before_the_first_check():
    assert RewardPool(3).process_ids == []
    first = shared_pool(3)
    assert shared_pool(3) is first
    close_shared_pools()
    assert shared_pool(3) is not first
    close_shared_pools()


PARENT = """
import asyncio, os, sys, time
from slime.rollout.rm_hub.pool import shared_pool
async def main():
    pool = shared_pool(1)
    print(await pool.run("tests.rollout.checks_for_tests.own_pid", (), timeout_s=60, place="x"), flush=True)
    hung = asyncio.create_task(pool.run("tests.rollout.checks_for_tests.hang", (), timeout_s=600, place="x"))
    await asyncio.sleep(0.2)
    {ending}
asyncio.run(main())
"""


@pytest.mark.parametrize("ending", ["os.kill(os.getpid(), 9)", "sys.exit(0)", "os._exit(1)"])
def test_worker_dies_with_its_parent_however_that_ends(ending):
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT.format(ending=ending)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(Path.cwd())},
    )
    with parent:
        pid = int(parent.stdout.readline())
    wait_until_dead(pid)


def test_worker_imports_nothing_heavy():
    code = (
        "import sys, slime.rollout.rm_hub.worker; "
        "print([m for m in ('torch', 'ray', 'transformers', 'aiohttp', 'sympy') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"

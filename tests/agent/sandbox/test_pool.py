"""A pool hands out each box once, alive, and closes what was not used."""

import asyncio

import pytest

from slime.agent.sandbox import Limits, LocalSandbox, SandboxClosedError, SandboxError, SandboxPool
from tests.agent.sandbox.escapes import own_leases


def test_no_box_is_used_twice_and_none_is_left():
    async def scenario():
        seen = []
        before = own_leases()
        async with SandboxPool(LocalSandbox, 2) as pool:
            for _ in range(3):
                async with pool.take() as sb:
                    seen.append(sb.sandbox_id)
                    assert (await sb.exec("ls -A; touch used")).stdout == ""
            taken = await asyncio.gather(*(use(pool) for _ in range(3)))
        assert len({*seen, *taken}) == 6
        assert own_leases() == before

    async def use(pool):
        async with pool.take() as sb:
            return sb.sandbox_id

    asyncio.run(scenario())


def test_a_box_whose_time_ran_out_while_it_waited_is_not_handed_out():
    ages = iter([0.5, 60, 60])

    async def scenario():
        async with SandboxPool(lambda: LocalSandbox(limits=Limits(seconds=next(ages))), 1) as pool:
            first = await pool._warm[0]
            with pytest.raises(SandboxClosedError):
                while True:
                    await first.exec("sleep 0.05")
            async with pool.take() as sb:
                assert (await sb.exec("echo alive")).stdout == "alive\n"

    asyncio.run(scenario())


def test_what_cannot_be_made_raises_where_it_is_taken():
    async def scenario():
        async with SandboxPool(lambda: LocalSandbox("/no/such/image"), 1) as pool, pool.take():
            pass

    with pytest.raises(SandboxError, match="not a directory"):
        asyncio.run(scenario())
    with pytest.raises(SandboxError):
        SandboxPool(LocalSandbox, 0)

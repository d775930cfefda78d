"""Long commands on a sandbox that has nothing but `exec`: detached, without a polling floor, dead when over
budget.
"""

import asyncio
import subprocess
import time

import pytest

from slime.agent.sandbox import LocalSandbox, SandboxClosedError, SandboxError, exec_and_wait
from slime.agent.sandbox.run import git_diff
from tests.agent.sandbox.escapes import tag, until_gone, with_argument


class Bare:
    """A sandbox whose `exec` has no more than the protocol's arguments and promises."""

    def __init__(self, inner):
        self.inner = inner
        self.sandbox_id = inner.sandbox_id
        self.calls = 0

    async def exec(self, cmd, *, user="root", env=None, timeout=120, check=False, idempotent=True):
        self.calls += 1
        return await self.inner.exec(cmd, user=user, env=env, timeout=timeout, check=check)


def in_a_bare_sandbox(scenario, image=None):
    async def main():
        async with LocalSandbox(image) as inner:
            await scenario(Bare(inner))

    asyncio.run(main())


def test_the_exit_code_arrives_with_the_end_and_few_calls():
    async def scenario(sb):
        command = "sleep 0.3; echo $X > out; exit 7"
        for _ in range(3):  # a busy machine may hold one up
            sb.calls, started = 0, time.monotonic()
            assert await exec_and_wait(sb, command, budget=60, env={"X": "here"}) == 7
            took = time.monotonic() - started
            assert sb.calls == 2
            if took < 4:
                break
        assert took < 4
        assert (await sb.exec("cat out")).stdout == "here\n"
        assert await exec_and_wait(sb, ["test", "a b", "=", "a b"], budget=60) == 0
        assert await exec_and_wait(sb, "test $PWD = /usr", budget=60, cwd="/usr") == 0
        assert await exec_and_wait(sb, "if then", budget=60) == 2

    in_a_bare_sandbox(scenario)


def test_over_budget_the_tree_is_dead():
    async def scenario(sb):
        mark = tag()
        assert await exec_and_wait(sb, f"(setsid setsid sleep {mark} &) ; sleep {mark}", budget=0.7) == -1
        assert await until_gone(mark)

    in_a_bare_sandbox(scenario)


def test_cancelled_the_tree_is_dead():
    async def scenario(sb):
        mark = tag()
        task = asyncio.create_task(exec_and_wait(sb, f"sleep {mark}", budget=60))
        while not with_argument(mark):
            await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await until_gone(mark)

    in_a_bare_sandbox(scenario)


def test_a_command_that_vanishes_is_an_error_and_no_exit_code():
    async def scenario(sb):
        with pytest.raises(SandboxClosedError, match="vanished"):
            await exec_and_wait(sb, "kill -9 $PPID $$", budget=60)

    in_a_bare_sandbox(scenario)


def test_the_diff_of_a_git_work_tree_has_new_files_and_leaves_the_index_alone(tmp_path):
    commands = "git init -q && echo a > a && git add a && git -c user.name=n -c user.email=e commit -qm first"
    subprocess.run(commands, shell=True, cwd=tmp_path, check=True)

    async def scenario(sb):
        await sb.exec("echo b >> a; mkdir d; echo n > d/new; mkdir .harness; echo log > .harness/log")
        patch = await git_diff(sb, sb.inner.workdir, exclude=(".harness",))
        assert "+b" in patch
        assert "d/new" in patch
        assert "log" not in patch
        assert (await sb.exec("git -c safe.directory='*' diff --cached --name-only")).stdout == ""
        with pytest.raises(SandboxError, match="no diff"):
            await git_diff(sb, "/usr", exclude=())

    in_a_bare_sandbox(scenario, tmp_path)

"""The E2B backend: settings, retries, errors. Played by `fakes/e2b`: no service is involved."""

import asyncio
import sys
from pathlib import Path

import pytest

from slime.agent.sandbox import (
    E2BSandbox,
    SandboxClosedError,
    SandboxCommandError,
    SandboxError,
    SandboxFileNotFoundError,
    SandboxUnavailableError,
    exec_and_wait,
)
from tests.agent.sandbox.escapes import tag, until_gone


@pytest.fixture
def e2b(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "fakes"))
    monkeypatch.delitem(sys.modules, "e2b", raising=False)
    monkeypatch.setattr("random.uniform", lambda low, high: 0.0)
    for name in ("IMAGE_METADATA_KEY", "LIFETIME_SEC", "RPC_RETRIES"):
        monkeypatch.delenv(f"SLIME_AGENT_SANDBOX_{name}", raising=False)
        monkeypatch.delenv(f"SWE_SANDBOX_{name}", raising=False)
    import e2b

    yield e2b
    sys.modules.pop("e2b", None)


def in_a_sandbox(scenario, **options):
    async def main():
        async with E2BSandbox("image:1", **{"image_metadata_key": "acme.io/image", **options}) as sb:
            await scenario(sb)

    asyncio.run(main())


async def nothing(sb):
    pass


def test_image_and_size_are_metadata_and_the_sandbox_is_killed(e2b):
    in_a_sandbox(nothing, size="xl", timeout=99)
    metadata = {"acme.io/image": "image:1", "acme.io/size": "xl"}
    assert [("create", {"timeout": 99, "metadata": metadata}), ("kill", {})] == e2b.CALLS


def test_settings_come_from_the_environment_under_both_names(e2b, monkeypatch):
    monkeypatch.setenv("SLIME_AGENT_SANDBOX_IMAGE_METADATA_KEY", "image")
    monkeypatch.setenv("SWE_SANDBOX_LIFETIME_SEC", "7")
    monkeypatch.setenv("SLIME_AGENT_SANDBOX_RPC_RETRIES", "2")
    sb = E2BSandbox("i")
    assert (sb.metadata, sb.timeout, sb.rpc_retries) == ({"image": "i", "size": "md"}, 7, 2)


def test_without_a_metadata_key_there_is_no_sandbox(e2b):
    with pytest.raises(SandboxError, match="IMAGE_METADATA_KEY"):
        E2BSandbox("i")


def test_commands_and_files(e2b):
    async def scenario(sb):
        assert sb.sandbox_id == "i0123"
        assert tuple(await sb.exec("echo $A; echo b >&2; exit 3", env={"A": "a"})) == (3, "a\n", "b\n")
        assert (await sb.exec(["printf", "%s", "x y"])).stdout == "x y"
        with pytest.raises(SandboxCommandError):
            await sb.exec("false", check=True)
        await sb.write_file("/d/f", "täxt", user="agent")
        assert await sb.read_file("/d/f") == "täxt"
        with pytest.raises(SandboxFileNotFoundError, match="does not exist"):
            await sb.read_file("/missing")
        assert await exec_and_wait(sb, "exit 6", budget=30) == 6

    in_a_sandbox(scenario)


def test_transient_errors_are_tried_again_but_not_what_may_run_once_only(e2b):
    async def scenario(sb):
        e2b.TROUBLE[:] = [e2b.RateLimitException("slow down"), ConnectionResetError("cut")]
        assert (await sb.exec("echo ok")).stdout == "ok\n"
        e2b.TROUBLE[:] = [e2b.RateLimitException("slow down")]
        with pytest.raises(SandboxError, match="slow down"):
            await sb.exec("echo ok", idempotent=False)
        e2b.TROUBLE[:] = [e2b.RateLimitException("slow down")] * 3
        with pytest.raises(SandboxError, match="slow down"):
            await sb.exec("echo ok")
        e2b.TROUBLE[:] = [e2b.SandboxException("no")]
        with pytest.raises(SandboxError, match="no"):
            await sb.read_file("/f")
        e2b.TROUBLE.clear()

    in_a_sandbox(scenario, rpc_retries=2)


def test_a_sandbox_that_ended_is_closed_and_foreign_errors_pass(e2b):
    async def scenario(sb):
        e2b.TROUBLE[:] = [e2b.SandboxNotRunningException("was not found")]
        with pytest.raises(SandboxClosedError):
            await sb.exec("true")
        e2b.TROUBLE[:] = [ZeroDivisionError("ours")]
        with pytest.raises(ZeroDivisionError):
            await sb.exec("true")

    in_a_sandbox(scenario)


def test_out_of_time_the_tree_is_killed(e2b):
    async def scenario(sb):
        mark = tag()
        result = await sb.exec(f"(setsid sleep {mark} &); sleep {mark}", timeout=0.6)
        assert (result.code, result.timed_out) == (-1, True)
        assert await until_gone(mark)

    in_a_sandbox(scenario)


def test_without_the_package_the_remedy_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "e2b", None)
    with pytest.raises(SandboxUnavailableError, match="pip install e2b"):
        in_a_sandbox(nothing)

"""What the docker client is told, and what its answers become: played by `fakes/docker`, with no engine."""

import asyncio
import json
import os
import shutil
from pathlib import Path

import pytest

from slime.agent.sandbox import (
    DockerSandbox,
    Limits,
    SandboxClosedError,
    SandboxCommandError,
    SandboxError,
    SandboxFileError,
    SandboxFileNotFoundError,
    SandboxUnavailableError,
    ensure_agent_user,
    exec_and_wait,
)
from slime.agent.sandbox.leases import pid_namespace
from tests.agent.sandbox.escapes import tag, until_gone

FAKE = Path(__file__).parent / "fakes" / "docker"


@pytest.fixture
def state(tmp_path, monkeypatch):
    client = tmp_path / "bin" / "docker"
    client.parent.mkdir()
    shutil.copy(FAKE, client)
    client.chmod(0o755)
    folder = tmp_path / "state"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{client.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_DOCKER", str(folder))
    return folder


def calls(state):
    return [json.loads(line) for line in (state / "calls.jsonl").read_text().splitlines()]


def in_a_container(scenario, **options):
    async def main():
        async with DockerSandbox("image:1", **options) as sb:
            await scenario(sb)

    asyncio.run(main())


def test_the_container_is_bounded_and_removed(state):
    async def scenario(sb):
        assert (await sb.exec("echo hi")).stdout == "hi\n"

    limits = Limits(memory=123 << 20, processes=45, seconds=678)
    in_a_container(scenario, limits=limits, network="none", binds={"/opt/node": "/opt/node"})
    run = next(call for call in calls(state) if call[0] == "run")
    assert run[-2:] == ["image:1", "678"]
    options = " ".join(run)
    for wanted in (
        *("--network none", f"--memory {123 << 20}", "--pids-limit 45", "--security-opt no-new-privileges"),
        *("--entrypoint sleep", "--mount type=bind,source=/opt/node,target=/opt/node,readonly", "--rm"),
    ):
        assert wanted in options
    assert calls(state)[-1][0] == "rm"
    assert not list(state.glob("*.box"))


def test_commands_are_argument_lists_with_user_and_environment(state):
    async def scenario(sb):
        code, out, err = await sb.exec("echo $A; pwd >&2; exit 3", user="agent", env={"A": "x y"}, cwd="/srv")
        assert (code, out) == (3, "x y\n")
        assert err
        call = calls(state)[-1]
        assert call[call.index("--user") + 1] == "agent"
        assert call[call.index("--workdir") + 1] == "/srv"
        assert "A=x y" in call
        assert (await sb.exec(["printf", "%s", "a;b"])).stdout == "a;b"
        assert (await sb.exec("cat", stdin="typed")).stdout == "typed"
        with pytest.raises(SandboxCommandError, match="ended with 9"):
            await sb.exec("exit 9", check=True)
        await ensure_agent_user(sb, name="root")

    in_a_container(scenario)


def test_files_go_through_the_container(state):
    async def scenario(sb):
        await sb.write_file("sub/file", "täxt")
        assert await sb.read_file("sub/file") == "täxt"
        with pytest.raises(SandboxFileNotFoundError):
            await sb.read_file("missing")
        with pytest.raises(SandboxFileError, match="regular"):
            await sb.read_file("sub")
        with pytest.raises(SandboxFileError):
            await sb.write_file("sub/file/below", "x")

    in_a_container(scenario)


def test_out_of_time_the_tree_is_killed_in_the_container(state):
    async def scenario(sb):
        mark = tag()
        result = await sb.exec(f"(setsid setsid sleep {mark} &); sleep {mark}", timeout=0.6)
        assert (result.code, result.timed_out) == (-1, True)
        assert await until_gone(mark)
        assert await exec_and_wait(sb, "exit 4", budget=20) == 4

    in_a_container(scenario)


def test_a_removed_container_is_closed(state):
    async def scenario(sb):
        box = state / f"{sb.sandbox_id}.box"
        kept = box.rename(state / "kept")
        with pytest.raises(SandboxClosedError, match="No such container"):
            await sb.exec("true")
        kept.rename(box)

    in_a_container(scenario)


def test_containers_of_dead_owners_are_reaped_and_others_left(state):
    (state / "dead.box").write_text(f"{pid_namespace()}/{os.getpid()}/1")
    (state / "elsewhere.box").write_text(f"pid:[1]/{os.getpid()}/1")

    async def scenario(sb):
        assert not (state / "dead.box").exists()
        assert (state / "elsewhere.box").exists()
        assert await sb.reap() == []

    in_a_container(scenario)


def test_what_docker_refuses_is_an_error(state):
    async def make(*arguments, **options):
        async with DockerSandbox(*arguments, **options):
            pass

    with pytest.raises(SandboxError, match="Unable to find image"):
        asyncio.run(make("no-such-image"))
    with pytest.raises(SandboxUnavailableError, match="not installed"):
        asyncio.run(make("image", docker="no-such-client"))

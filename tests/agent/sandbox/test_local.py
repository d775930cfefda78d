"""The contract of a sandbox, kept by the local one on every backend that this machine has."""

import asyncio
import os
import shutil
import time
from pathlib import Path

import pytest

from slime.agent.sandbox import (
    EXIT_TIME_BUDGET_EXCEEDED,
    Limits,
    LocalSandbox,
    SandboxClosedError,
    SandboxCommandError,
    SandboxError,
    SandboxFileError,
    SandboxFileNotFoundError,
    SandboxUnavailableError,
    ensure_agent_user,
    exec_and_wait,
)
from slime.agent.sandbox.backends import BACKENDS, choose
from tests.agent.sandbox.escapes import DAEMON, own_leases, tag, until_gone, with_argument


def run(coroutine):
    return asyncio.run(coroutine)


@pytest.fixture(params=BACKENDS)
def backend(request):
    try:
        run(choose(request.param))
    except SandboxUnavailableError as error:
        pytest.skip(str(error))
    return request.param


@pytest.fixture
def image(tmp_path):
    folder = tmp_path / "image"
    (folder / "sub").mkdir(parents=True)
    (folder / "a.txt").write_text("one\ntwo\n")
    (folder / "sub" / "b.sh").write_text("#!/bin/sh\n")
    (folder / "link").symlink_to("a.txt")
    return folder


def test_commands_files_and_the_environment(backend, image):
    async def scenario():
        async with LocalSandbox(image, require=backend, env={"KEPT": "yes"}) as sb:
            assert sb.backend == backend
            code, out, err = await sb.exec("cat link; pwd; echo bad >&2; exit 3", user="agent")
            assert (code, out, err) == (3, f"one\ntwo\n{sb.workdir}\n", "bad\n")
            assert (await sb.exec(["printf", "%s|", "a b", "$HOME"])).stdout == "a b|$HOME|"
            assert (await sb.exec('echo "$KEPT $MORE"', env={"MORE": "too"})).stdout == "yes too\n"
            assert (await sb.exec("cat; pwd", stdin="typed\n", cwd="/usr")).stdout == "typed\n/usr\n"
            assert "HF_HUB" not in (await sb.exec("env")).stdout
            await sb.write_file("deep/er/text", "täxt")
            await sb.write_file(f"{sb.workdir}/bytes", b"\0\xff", user="agent", mode=0o755)
            await sb.write_file("copied", image / "a.txt")
            assert await sb.read_file("deep/er/text") == "täxt"
            assert await sb.read_bytes("bytes") == b"\0\xff"
            assert (await sb.exec("cmp copied a.txt && test -x bytes")).code == 0
        assert (image / "a.txt").read_text() == "one\ntwo\n"
        assert not (image / "copied").exists()

    run(scenario())


def test_failures_are_errors_and_never_empty_answers(backend, image):
    async def scenario():
        async with LocalSandbox(image, require=backend) as sb:
            with pytest.raises(SandboxFileNotFoundError, match="missing"):
                await sb.read_file("missing")
            with pytest.raises(SandboxFileError, match="regular file"):
                await sb.read_file("sub")
            with pytest.raises(SandboxCommandError, match="ended with 4"):
                await sb.exec("echo why >&2; exit 4", check=True)
            with pytest.raises(SandboxError, match="No such file"):
                await sb.exec(["no-such-program"])
            with pytest.raises(SandboxError, match="No such file"):
                await sb.exec("true", cwd="/nowhere")
            with pytest.raises(SandboxError, match="stdin"):
                await sb.exec("echo " + "x" * 200_000)
            with pytest.raises(SandboxError, match="no user"):
                await sb.exec("true", user="somebody")
        with pytest.raises(SandboxClosedError):
            await sb.exec("true")
        await sb.close()

    run(scenario())


def test_output_is_bounded_and_says_so(backend):
    async def scenario():
        async with LocalSandbox(require=backend) as sb:
            result = await sb.exec("echo first; seq 100000; echo last", max_output=1000)
            assert result.stdout.startswith("first\n")
            assert result.stdout.endswith("last\n")
            assert "bytes of output cut" in result.stdout
            assert len(result.stdout) < 1100
            assert (await sb.exec("head -c 300000 /dev/zero | tr '\\0' x")).stdout == "x" * 300_000

    run(scenario())


def test_a_command_that_runs_out_of_time_dies_with_all_that_it_started(backend):
    async def scenario():
        async with LocalSandbox(require=backend) as sb:
            mark = tag()
            for seconds in (0.6, 10):  # a slow machine may need more to begin
                result = await sb.exec(f"echo begun; {DAEMON.format(tag=mark)}; sleep 60", timeout=seconds)
                if result.stdout:
                    break
            assert (result.code, result.stdout, result.timed_out) == (
                EXIT_TIME_BUDGET_EXCEEDED,
                "begun\n",
                True,
            )
            assert await until_gone(mark)
            assert await exec_and_wait(sb, "exit 5", budget=20) == 5
            assert await exec_and_wait(sb, DAEMON.format(tag=mark) + "; sleep 60", budget=0.6) == -1
            assert await until_gone(mark)

    run(scenario())


def test_a_cancelled_command_is_killed_and_the_box_stays_usable(backend):
    async def scenario():
        async with LocalSandbox(require=backend) as sb:
            mark = tag()
            task = asyncio.create_task(sb.exec(f"sleep {mark}"))
            while not with_argument(mark):
                await asyncio.sleep(0.02)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert await until_gone(mark)
            assert (await sb.exec("echo on")).stdout == "on\n"

    run(scenario())


def test_a_command_that_ends_while_it_begins_leaves_nothing(backend):
    """By a cancellation at any moment of its start, or by a time limit that is over at once."""

    async def scenario():
        async with LocalSandbox(require=backend) as sb:
            mark = tag()
            for moment in range(40):
                task = asyncio.create_task(sb.exec(["sleep", mark], timeout=20))
                await asyncio.sleep(moment * 0.00025)
                task.cancel()
                await asyncio.wait({task})
                assert task.cancelled()
            for _ in range(10):
                assert (await sb.exec(["sleep", mark], timeout=0.0)).timed_out
            assert await until_gone(mark)

    run(scenario())


def test_a_background_program_outlives_its_command_and_does_not_hold_it_up(backend):
    async def scenario():
        async with LocalSandbox(require=backend) as sb:
            mark = tag()
            started = time.monotonic()
            assert (
                await sb.exec(f"(while :; do echo noise; sleep 0.05; done) & sleep {mark} & echo up")
            ).stdout
            assert time.monotonic() - started < 20
            while not with_argument(mark):  # the shell has forked it, and it is becoming `sleep`
                assert time.monotonic() - started < 20
                await asyncio.sleep(0.02)
        assert await until_gone(mark)

    run(scenario())


def test_many_commands_at_once(backend):
    async def scenario():
        async with LocalSandbox(require=backend) as sb:
            results = await asyncio.gather(*(sb.exec(f"sleep 0.0{i % 5}; echo {i}") for i in range(20)))
            assert [result.stdout for result in results] == [f"{i}\n" for i in range(20)]

    run(scenario())


def test_the_adapter_is_reached_through_a_socket_made_in_the_box(backend):
    """Whatever the network of the box: a server of this process answers on its loopback."""

    async def answer(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello")
        await writer.drain()
        writer.close()

    async def scenario():
        async with LocalSandbox(require=backend) as sb:
            listener = await sb.listen()
            port = listener.getsockname()[1]
            async with await asyncio.start_server(answer, sock=listener):
                ask = f"import urllib.request as u; print(u.urlopen('http://127.0.0.1:{port}/').read())"
                result = await sb.exec(["/usr/bin/python3", "-c", ask])
            assert result.stdout == "b'hello'\n", result.stderr

    run(scenario())


def test_ports_are_ready_when_the_box_is(backend):
    async def scenario():
        async with LocalSandbox(require=backend, ports=[0]) as sb:
            assert sb.sockets[0].getsockname()[0] == "127.0.0.1"

    run(scenario())


def test_a_bound_installation_is_visible_but_not_writable(backend, tmp_path):
    tool = tmp_path / "tool" / "bin" / "greet"
    tool.parent.mkdir(parents=True)
    tool.write_text("#!/bin/sh\necho hello\n")
    tool.chmod(0o755)
    prefix = str(tmp_path / "tool")
    target = prefix if backend == "plain" else "/opt/tool"

    async def scenario():
        async with LocalSandbox(require=backend, binds={prefix: target}) as sb:
            assert (await sb.exec("greet")).stdout == "hello\n"
            if backend != "plain":
                assert (await sb.exec("echo x > /opt/tool/bin/greet")).code != 0

    run(scenario())
    assert "echo hello" in tool.read_text()


def test_node_and_python_run_inside(backend):
    async def scenario():
        async with LocalSandbox(require=backend) as sb:
            assert (await sb.exec("python3 -c 'print(6 * 7)'")).stdout == "42\n"
            if shutil.which("node"):
                assert (await sb.exec("node -e 'console.log(6 * 7)'")).stdout == "42\n"

    run(scenario())


def test_the_agent_user_is_there(backend):
    async def scenario():
        async with LocalSandbox(require=backend) as sb:
            before = Path("/etc/passwd").read_bytes()
            await ensure_agent_user(sb, workdir=sb.workdir)
            assert Path("/etc/passwd").read_bytes() == before
            result = await sb.exec("echo $USER; echo x > ~/mine && echo y > here", user="agent", check=True)
            assert result.stdout == "agent\n"

    run(scenario())


def test_files_kept_on_disk_are_bounded_by_the_watchdog(backend):
    """Where no file system keeps the limit the box is looked at; what passes it is killed, and told."""

    async def scenario():
        async with LocalSandbox(require=backend, limits=Limits(disk=16 << 20), storage="disk") as sb:
            assert sb.isolation["disk"] == "watchdog"
            result = await sb.exec("dd if=/dev/zero of=big bs=1M count=64; sleep 30", timeout=20)
            assert (result.code, result.limit) == (137, "disk")

    run(scenario())


def test_a_box_closed_under_a_running_command_ends_it_with_an_error(backend):
    async def scenario():
        mark = tag()
        async with LocalSandbox(require=backend) as sb:
            task = asyncio.create_task(sb.exec(f"sleep {mark}"))
            while not with_argument(mark):
                await asyncio.sleep(0.02)
        with pytest.raises(SandboxClosedError):
            await task
        assert await until_gone(mark)

    run(scenario())


def test_what_cannot_be_a_box_is_refused_and_leaves_nothing():
    async def scenario(*arguments, **options):
        async with LocalSandbox(*arguments, **options):
            pass

    before = own_leases()
    with pytest.raises(SandboxError, match="not a directory"):
        run(scenario("/no/such/image"))
    with pytest.raises(SandboxError, match="working directory"):
        run(scenario(workdir="/"))
    with pytest.raises(SandboxError, match="does not exist"):
        run(scenario(binds={"/no/such": "/opt/x"}))
    with pytest.raises(SandboxError, match="Limits.memory"):
        Limits(memory=0)
    assert own_leases() == before


def test_a_bind_below_the_hosts_programs_is_refused_without_touching_them(tmp_path):
    """The host's /usr is shown, and a mount point that it lacks cannot be made in it."""
    if run(choose(None))[0] == "plain":
        pytest.skip("a plain box shows the host as it is")

    async def scenario():
        async with LocalSandbox(binds={str(tmp_path): "/usr/local/not-there"}):
            pass

    before = own_leases()
    with pytest.raises(SandboxError, match="not-there"):
        run(scenario())
    assert not Path("/usr/local/not-there").exists()
    assert own_leases() == before


def test_the_plain_backend_says_what_it_does_not_keep_apart():
    async def scenario():
        async with LocalSandbox(require="plain") as sb:
            assert {name for name, what in sb.isolation.items() if what.startswith("none")} == {
                *("files", "processes", "network")
            }
            with pytest.raises(SandboxFileError, match="out of the box"):
                await sb.read_file("/etc/passwd")
            await sb.exec(["ln", "-s", "/etc", "out"])
            with pytest.raises(SandboxFileError, match="out of the box"):
                await sb.write_file("out/x", "x")
            assert (await sb.exec(f"kill -0 {os.getpid()}")).code == 0

    run(scenario())

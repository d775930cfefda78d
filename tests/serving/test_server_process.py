"""Whatever a server starts ends with it and with its owner, whoever is killed."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from slime.errors import EngineError
from slime.serving import server_process
from slime.serving.server_process import ServerProcess, answers
from tests.serving.clock import Clock
from tests.serving.wire import wait_for

# A server with a descendant that left its session, lost its parent and ignores SIGTERM.
SERVER = """
import os, signal, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        with open(sys.argv[1] + ".part", "w") as file:
            file.write(str(os.getpid()))
        os.rename(sys.argv[1] + ".part", sys.argv[1])
        time.sleep(600)
    os._exit(0)
os.wait()
print("listening", flush=True)
if sys.argv[2] == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if sys.argv[2] == "failing":
    while not os.path.exists(sys.argv[1]):
        time.sleep(0.01)
    sys.exit(3)
time.sleep(600)
"""
OWNER = """
import sys, time
from pathlib import Path
from tests.serving.test_server_process import start
server = start(Path(sys.argv[1]))
print(server.pid, server._guard.pid, flush=True)
time.sleep(600)
"""


def start(folder, behaviour="ordinary", **options):
    descendant = folder / "descendant"
    return ServerProcess(
        [sys.executable, "-c", SERVER, str(descendant), behaviour],
        folder / "log" / "server.log",
        name="test server",
        ready=lambda: "http://here" if behaviour != "failing" and descendant.exists() else None,
        **options,
    )


def descendant_of(folder):
    return int((folder / "descendant").read_text())


def runs(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


def parent_of(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


@pytest.fixture
def server(tmp_path):
    process = start(tmp_path)
    yield process
    process.stop()


def test_it_is_ready_where_it_says_and_has_the_servers_own_pid(server):
    assert server.url == "http://here"
    assert server.is_alive
    assert SERVER in Path(f"/proc/{server.pid}/cmdline").read_text()
    wait_for(server.log_tail)
    assert server.log_tail() == "    listening"


@pytest.mark.parametrize("behaviour", ["ordinary", "stubborn"])
def test_a_stop_leaves_nothing(tmp_path, behaviour):
    process = start(tmp_path, behaviour)
    process.stop(0.5)
    assert not process.is_alive
    assert not runs(process.pid)
    assert not runs(descendant_of(tmp_path))
    process.stop()


def test_a_killed_server_takes_all_it_started_along_and_says_how_it_ended(server, tmp_path):
    os.kill(server.pid, signal.SIGKILL)
    assert "the test server process was killed by signal 9" in server.wait_for_exit()
    assert not runs(descendant_of(tmp_path))
    assert not server.is_alive


def test_a_server_that_ends_at_a_signal_is_told_so(server):
    server.stop()
    assert "was killed by signal 15" in server.wait_for_exit()


def test_a_killed_guard_takes_all_along(server, tmp_path):
    inner = parent_of(server.pid)
    assert parent_of(inner) == server._guard.pid
    os.kill(inner, signal.SIGKILL)
    assert "killed by signal 9" in server.wait_for_exit()
    assert not runs(server.pid)
    assert not runs(descendant_of(tmp_path))


def test_a_killed_outer_guard_takes_all_along(server, tmp_path):
    os.kill(server._guard.pid, signal.SIGKILL)
    wait_for(lambda: not runs(server.pid) and not runs(descendant_of(tmp_path)))


def test_a_killed_owner_takes_all_along(tmp_path):
    words = [sys.executable, "-c", OWNER, str(tmp_path)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as owner:
        pids = [int(word) for word in owner.stdout.readline().split()]
        pids.append(descendant_of(tmp_path))
        assert all(map(runs, pids))
        owner.kill()
    wait_for(lambda: not any(map(runs, pids)))


def test_it_outlives_the_thread_that_started_it(tmp_path):
    started = []
    thread = threading.Thread(target=lambda: started.append(start(tmp_path)))
    thread.start()
    thread.join()
    (process,) = started
    with pytest.raises(subprocess.TimeoutExpired):
        process._guard.wait(0.3)
    process.stop()


def test_a_server_that_ends_before_it_is_ready_is_an_error_with_its_log(tmp_path):
    with pytest.raises(EngineError, match=r"did not start: .* exited with code 3(.|\n)*listening"):
        start(tmp_path, "failing")
    assert not runs(descendant_of(tmp_path))


def test_a_server_that_is_not_ready_in_time_is_killed(tmp_path, monkeypatch):
    clock = Clock()
    monkeypatch.setattr(server_process, "time", clock)
    with pytest.raises(EngineError, match=r"was not ready within 30 s"):
        ServerProcess(
            [sys.executable, "-c", SERVER, str(tmp_path / "descendant"), "ordinary"],
            tmp_path / "log",
            name="test server",
            ready=clock.skip,
            ready_timeout=30,
        )


def test_a_command_that_does_not_exist_is_an_error_that_names_it(tmp_path):
    with pytest.raises(EngineError, match=r"did not start(.|\n)*cannot start no-such-program"):
        ServerProcess(["no-such-program"], tmp_path / "log", name="test server", ready=lambda: None)


def test_a_server_that_answers_is_ready_at_its_url():
    from tests.serving.engines import scripted_server

    with scripted_server() as handle:
        assert answers(handle.url)() == handle.url
        assert answers(handle.url, "/nowhere")() is None
    assert answers("http://127.0.0.1:1")() is None

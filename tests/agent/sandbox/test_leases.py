"""What a killed owner leaves behind is removed: by the box itself, and by the next owner where that died
too.
"""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from slime.agent.sandbox import LocalSandbox, SandboxError, SandboxUnavailableError
from slime.agent.sandbox.backends import choose
from slime.agent.sandbox.leases import (
    Lease,
    lease_path,
    pid_namespace,
    read_leases,
    reap_leases,
    runtime_directory,
)
from tests.agent.sandbox.escapes import tag, until_gone, with_argument

ROOT = Path(__file__).parents[3]
OWNER = """
import asyncio, sys
from slime.agent.sandbox import LocalSandbox
LEFT = "setsid setsid sleep {0} >/dev/null 2>&1 & (setsid sleep {0} &); sleep 0.1"
async def main():
    async with LocalSandbox(require=sys.argv[1]) as sb:
        await sb.exec(LEFT.format(sys.argv[2]))
        print(sb.sandbox_id, flush=True)
        await asyncio.sleep(60)
asyncio.run(main())
"""


@pytest.fixture(params=["namespaces", "plain"])
def backend(request):
    try:
        asyncio.run(choose(request.param))
    except SandboxUnavailableError as error:
        pytest.skip(str(error))
    return request.param


def start_owner(backend, mark):
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, backend, mark], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    box = owner.stdout.readline().strip()
    wait_for(lambda: with_argument(mark))
    return owner, next(lease for lease in read_leases() if lease.id == box)


def kill_owner(owner):
    owner.kill()
    owner.wait()
    owner.stdout.close()


def gone(lease):
    """Whether nothing of the box is left."""
    return not any(Path(path).exists() for path in (lease.directory, *lease.groups, lease_path(lease.id)))


def wait_for(condition):
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_killed_owner_takes_its_box_along(backend):
    mark = tag()
    owner, lease = start_owner(backend, mark)
    kill_owner(owner)
    assert asyncio.run(until_gone(mark))
    wait_for(lambda: gone(lease))


def test_what_outlives_owner_and_box_is_reaped(backend, tmp_path, monkeypatch):
    """In a directory of its own: another process with a box would reap it first."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    mark = tag()
    owner, lease = start_owner(backend, mark)
    os.kill(owner.pid, signal.SIGSTOP)
    for pid in lease.processes:
        os.kill(pid, signal.SIGKILL)
    kill_owner(owner)
    assert lease.id in {each.id for each in read_leases()}
    assert lease.id in reap_leases()
    assert asyncio.run(until_gone(mark))
    assert gone(lease)


def test_living_owners_and_other_pid_namespaces_are_left_alone():
    mine = Lease(
        "b", pid_namespace(), os.getpid(), int(Path("/proc/self/stat").read_text().split()[21]), {}, "/x", []
    )
    assert not mine.orphaned
    assert Lease("b", mine.namespace, mine.owner, mine.owner_started - 1, {}, "/x", []).orphaned
    assert not Lease("b", "pid:[1]", mine.owner, mine.owner_started - 1, {}, "/x", []).orphaned


def test_a_directory_of_somebody_else_is_not_trusted(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / f"slime-sandbox-{os.geteuid()}").mkdir(mode=0o777)
    (tmp_path / f"slime-sandbox-{os.geteuid()}").chmod(0o777)
    with pytest.raises(SandboxError, match="private"):
        runtime_directory()


def test_a_closed_box_leaves_nothing(backend):
    async def scenario():
        async with LocalSandbox(require=backend) as sb:
            return next(lease for lease in read_leases() if lease.id == sb.sandbox_id)

    lease = asyncio.run(scenario())
    assert gone(lease)
    assert len(lease.processes) >= 1

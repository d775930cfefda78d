"""Leases: a file per box that says who owns it and what it consists of, so that a crashed owner's boxes can
be removed.

Invariant: only what a lease in a directory of this user names is touched, only once its owner is gone, and
processes only if pid and start time both match. A box normally removes itself when its owner ends; leases are
for the case where the box's own processes were killed too.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import stat
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from slime.agent.sandbox.base import SandboxError
from slime.agent.sandbox.box.cleanup import remove_cgroup, remove_tree
from slime.agent.sandbox.box.processes import all_pids, kill, kill_tree, start_time

MARKER = "SLIME_SANDBOX"
"""Environment variable that every program of a box starts with; its value is the box's id."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Lease:
    """One box. `processes` maps pid to start time (the owner's apart), `namespace` is the pid namespace they
    are in.
    """

    id: str
    namespace: str
    owner: int
    owner_started: int
    processes: dict[int, int]
    directory: str
    groups: list[str]

    @property
    def orphaned(self) -> bool:
        """Whether the owner was seen from here and is gone."""
        return self.namespace == pid_namespace() and start_time(self.owner) != self.owner_started


def runtime_directory() -> Path:
    """Where boxes and leases of this user live: a directory that nobody else can write to.

    Raises:
        SandboxError: somebody else made it.
    """
    path = Path(tempfile.gettempdir()).resolve() / f"slime-sandbox-{os.geteuid()}"
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    state = path.lstat()
    if not stat.S_ISDIR(state.st_mode) or state.st_uid != os.geteuid() or state.st_mode & 0o077:
        raise SandboxError(
            f"{path} is not a private directory of this user", remedy="remove it, or set TMPDIR"
        )
    return path


def lease_path(box: str) -> Path:
    """The lease of a box."""
    return runtime_directory() / f"{box}.json"


def write_lease(box: str, processes: list[int], directory: Path, groups: list[Path]) -> None:
    """Register a box of this process, in place of an earlier lease of it."""
    started = {pid: found for pid in processes if (found := start_time(pid)) is not None}
    owner = os.getpid()
    lease = Lease(
        *(box, pid_namespace(), owner, start_time(owner) or 0),
        *(started, str(directory), [str(group) for group in groups]),
    )
    temporary = lease_path(box).with_suffix(".tmp")
    temporary.write_text(json.dumps(asdict(lease)))
    temporary.replace(lease_path(box))


def release_lease(box: str) -> None:
    """Remove a box of this process, as far as it has not removed itself."""
    for lease in read_leases():
        if lease.id == box:
            remove(lease)


def read_leases() -> list[Lease]:
    """All leases of this user; one that is gone or half-written in the meantime is left out."""
    leases = []
    for path in sorted(runtime_directory().glob("*.json")):
        with contextlib.suppress(FileNotFoundError):
            fields = json.loads(path.read_text())
            leases.append(
                Lease(**{**fields, "processes": {int(k): v for k, v in fields["processes"].items()}})
            )
    return leases


def reap_leases() -> list[str]:
    """Kill and remove what owners that are gone left behind; returns the ids of the boxes."""
    reaped = []
    for lease in read_leases():
        if lease.orphaned:
            _log.warning("sandbox %s: its owner (process %d) is gone; removing it", lease.id, lease.owner)
            remove(lease)
            reaped.append(lease.id)
    return reaped


def remove(lease: Lease) -> None:
    """Kill the box's processes and remove its groups, directory and lease."""
    living = [pid for pid, started in lease.processes.items() if start_time(pid) == started]
    kill_tree(living)
    for pid in living:
        kill(pid, signal.SIGKILL)
    kill_marked(lease.id)
    for group in lease.groups:
        for pid in _members(Path(group)):
            kill(pid, signal.SIGKILL)
        remove_cgroup(group)
    remove_tree(lease.directory)
    lease_path(lease.id).unlink(missing_ok=True)


def kill_marked(box: str) -> int:
    """Kill every process that was started with the box's marker in its environment; returns how many."""
    wanted = f"{MARKER}={box}".encode()
    killed = 0
    while found := [pid for pid in all_pids() if wanted in _environment(pid).split(b"\0")]:
        for pid in found:
            kill(pid, signal.SIGKILL)
        killed += len(found)
    return killed


def _environment(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""  # gone, a kernel thread, or another user's


def _members(group: Path) -> list[int]:
    try:
        return [int(line) for line in (group / "cgroup.procs").read_text().split()]
    except OSError:
        return []


def pid_namespace() -> str:
    """The pid namespace of this process: pids of another one say nothing here."""
    return str(Path("/proc/self/ns/pid").readlink())

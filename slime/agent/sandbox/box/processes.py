"""Process trees, read from /proc: who descends from whom, what they use, and how a tree is ended for good.

A tree is looked at again and again until nothing of it is left, so that what forks while it is being killed
is caught too. Knows nothing of boxes.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Collection
from pathlib import Path

_PAGE = os.sysconf("SC_PAGE_SIZE")
_PPID, _START = 1, 19  # fields after the program's name in /proc/PID/stat


def stat_fields(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat after the name (state first), or None once the process is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None


def start_time(pid: int) -> int | None:
    """When the process started, in ticks since boot: with the pid, its identity. None for none or a
    zombie.
    """
    fields = stat_fields(pid)
    return int(fields[_START]) if fields is not None and fields[0] != "Z" else None


def all_pids() -> list[int]:
    """Every process that this /proc shows."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]  # noqa: PTH208 (a hot path)


def descendants(roots: Collection[int]) -> list[int]:
    """Living processes below `roots` (which are not included), zombies left out."""
    children: dict[int, list[int]] = {}
    dead: set[int] = set()
    for pid in all_pids():
        if (fields := stat_fields(pid)) is not None:
            children.setdefault(int(fields[_PPID]), []).append(pid)
            if fields[0] in "ZX":
                dead.add(pid)
    found: list[int] = []
    queue = list(roots)
    while queue:
        below = children.get(queue.pop(), [])
        found += [pid for pid in below if pid not in dead]
        queue += below
    return found


def private_bytes(pid: int) -> int:
    """Resident memory that is neither file nor shared memory; 0 once the process is gone."""
    try:
        fields = Path(f"/proc/{pid}/statm").read_text().split()
    except OSError:
        return 0
    return (int(fields[1]) - int(fields[2])) * _PAGE


def kill(pid: int, number: int) -> None:
    """Send a signal to a process that may be gone already, or not be ours."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def kill_tree(roots: Collection[int], *, spare: Collection[int] = (), seconds: float = 5.0) -> int:
    """Kill all that descends from `roots` apart from `spare`; returns how many were killed.

    Done after two looks in a row that find nothing: while parents die, one look can miss a child.
    """
    deadline = time.monotonic() + seconds
    killed: set[int] = set()
    quiet = 0
    while quiet < 2 and time.monotonic() < deadline:
        alive = [pid for pid in descendants(roots) if pid not in spare]
        for pid in alive:
            kill(pid, signal.SIGKILL)
        quiet = 0 if alive else quiet + 1
        if alive and killed.issuperset(alive):
            time.sleep(0.002)
        killed.update(alive)
    return len(killed)

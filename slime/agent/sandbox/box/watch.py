"""Limits that neither a cgroup nor the file system keeps: looked at again and again, and enforced by a kill
of all.

Knows the limits it was given (`memory`, `processes`, `disk`); counts in `hits` how often each was passed.
"""

from __future__ import annotations

import os
import time

from .processes import descendants, kill_tree, private_bytes
from .wire import Spec

_IDLE, _QUICK, _DISK_EVERY = 1.0, 0.05, 0.5


class Watch:
    """The watchdog of one box; `interval` is how often to look, in seconds."""

    def __init__(self, spec: Spec, counted: list[int]) -> None:
        self.limits = spec.watch
        self.counted = counted
        self.hits: dict[str, int] = {}
        self.interval = _QUICK if self.limits else _IDLE
        self._next_look = self._next_disk = 0.0

    def look(self, supervisors: set[int]) -> None:
        """Kill every program if a limit is passed."""
        now = time.monotonic()
        if not self.limits or not supervisors or now < self._next_look:
            return
        self._next_look = now + self.interval
        alive = [pid for pid in descendants([os.getpid()]) if pid not in supervisors]
        used = {"processes": len(alive), "memory": sum(map(private_bytes, alive))}
        if "disk" in self.limits and now >= self._next_disk:
            used["disk"] = sum(map(disk_usage, self.counted))
            self._next_disk = time.monotonic() + _DISK_EVERY
        for name, limit in self.limits.items():
            if used.get(name, 0) > limit:
                self.hits[name] = self.hits.get(name, 0) + 1
                kill_tree([os.getpid()], spare=supervisors)
                return


def disk_usage(below: int) -> int:
    """Bytes that the files below an open directory occupy."""
    total = 0
    for _, _, names, directory in os.fwalk(".", dir_fd=below):
        for name in names:
            try:
                total += os.stat(name, dir_fd=directory, follow_symlinks=False).st_blocks * 512
            except OSError:
                continue  # gone in the meantime
    return total

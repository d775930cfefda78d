"""Control groups for a box's memory and process count, version 1 or 2, below the group that this process is
in.

Invariant: only groups that were made here are written to. Where none can be made the answer is an empty
group, and the box's watchdog takes the limit over.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from slime.agent.sandbox.base import Limits

_MEMORY_FILES = {1: "memory.limit_in_bytes", 2: "memory.max"}
_SWAP_FILES = {1: "memory.memsw.limit_in_bytes", 2: "memory.swap.max"}
_EVENT_FILES = {1: "memory.oom_control", 2: "memory.events"}


@dataclass(frozen=True)
class Group:
    """Control groups of one box. `keeps` maps a limit's name to what keeps it, e.g. `memory: cgroup v1`."""

    directories: list[Path] = field(default_factory=list)
    keeps: dict[str, str] = field(default_factory=dict)
    events: Path | None = None

    def oom_kills(self) -> int:
        """How many processes of the group were killed for lack of memory."""
        if self.events is None:
            return 0
        try:
            pairs = [line.split() for line in self.events.read_text().splitlines()]
        except FileNotFoundError:
            return 0  # the box has ended and taken its group along
        return next((int(value) for name, value in pairs if name == "oom_kill"), 0)


def own_groups(mounts: str, memberships: str) -> dict[str, tuple[int, Path]]:
    """Controller to (version, this process's group), from the texts of /proc/self/mountinfo and
    /proc/self/cgroup.
    """
    points: dict[str, Path] = {}
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        kind, _, options = after.split()[:3]
        if kind == "cgroup2":
            points[""] = Path(before.split()[4])
        elif kind == "cgroup":
            points.update(dict.fromkeys(options.split(","), Path(before.split()[4])))
    found: dict[str, tuple[int, Path]] = {}
    for line in memberships.splitlines():
        _, controllers, path = line.split(":", 2)
        for name in controllers.split(",") if controllers else ():
            if name in points:
                found[name] = (1, points[name] / path.lstrip("/"))
        if not controllers and "" in points:
            own = points[""] / path.lstrip("/")
            for name in ("memory", "pids"):
                found.setdefault(name, (2, own))
    return found


def make_group(name: str, limits: Limits, *, memory: int) -> Group:
    """Groups called `name` that keep `memory` bytes and `limits.processes`, as far as this process may make
    them.
    """
    try:
        found = own_groups(Path("/proc/self/mountinfo").read_text(), Path("/proc/self/cgroup").read_text())
    except OSError:
        return Group()
    group = Group()
    events: Path | None = None
    for controller in ("memory", "pids"):
        version, parent = found.get(controller, (0, Path()))
        directory = _make(parent / name, controller, version) if version else None
        if directory is None:
            continue
        if directory not in group.directories:
            group.directories.append(directory)
        if controller == "pids":
            (directory / "pids.max").write_text(str(limits.processes))
            group.keeps["processes"] = f"cgroup v{version}"
        else:
            (directory / _MEMORY_FILES[version]).write_text(str(memory))
            if (swap := directory / _SWAP_FILES[version]).exists():
                swap.write_text(str(memory) if version == 1 else "0")
            group.keeps["memory"] = f"cgroup v{version}"
            events = directory / _EVENT_FILES[version]
    return Group(group.directories, group.keeps, events)


def _make(directory: Path, controller: str, version: int) -> Path | None:
    """A directory with the controller's files, or None where it cannot be had."""
    limit = _MEMORY_FILES[version] if controller == "memory" else "pids.max"
    try:
        if (
            version == 2
            and controller not in (directory.parent / "cgroup.subtree_control").read_text().split()
        ):
            return None  # to enable it would change a group that is not ours
        made = not directory.exists()
        directory.mkdir(exist_ok=True)
    except OSError:
        return None
    if (directory / limit).exists():
        return directory
    if made:
        directory.rmdir()
    return None

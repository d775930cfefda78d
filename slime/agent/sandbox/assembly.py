"""Putting a local box together: from what is wanted and which backend works, its specification and what
isolates it.

Invariant: each limit has exactly one keeper (control group, file system, rlimit or watchdog), named in
`isolation`.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from slime.agent.sandbox import bubblewrap
from slime.agent.sandbox.backends import Backend, make_staging
from slime.agent.sandbox.base import Limits, SandboxError, SandboxUnavailableError
from slime.agent.sandbox.box import seccomp
from slime.agent.sandbox.box.wire import Spec
from slime.agent.sandbox.cgroups import Group, make_group
from slime.agent.sandbox.client import Wrap, unwrapped
from slime.agent.sandbox.leases import lease_path


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What the user asked for. `storage` is `memory` or `disk`; `binds` maps host paths to box paths."""

    name: str
    image: Path | None
    limits: Limits
    workdir: str
    binds: Mapping[str, str]
    storage: str


@dataclass(frozen=True)
class Assembled:
    """A box that can be started: `homes` gives the home directory of each user, `temporary` a place for
    files.
    """

    spec: Spec
    wrap: Wrap
    group: Group
    isolation: dict[str, str]
    homes: dict[str, str]
    temporary: str


def assemble(wanted: Wanted, backend: Backend, *, overlay: bool) -> Assembled:
    """Make the box's directory and control groups.

    Raises:
        SandboxError: the image is no directory, the working directory no place for it, or a bind is missing.
    """
    _check(wanted, backend)
    staging = make_staging(wanted.name)
    storage = wanted.storage if backend == "namespaces" else "disk"
    files_in_memory = wanted.limits.disk if storage == "memory" else 0
    group = make_group(f"slime-{wanted.name}", wanted.limits, memory=wanted.limits.memory + files_in_memory)
    spec = _spec(wanted, backend, staging, storage, group, overlay=overlay)
    isolation = _isolation(spec, group)
    homes = {"root": "/root", "agent": "/home/agent"}
    if backend == "namespaces":
        return Assembled(spec, unwrapped, group, isolation, homes, "/tmp")
    if backend == "bubblewrap":
        wrap = bubblewrap.wrapper(staging, wanted.workdir, Path(spec.image), wanted.binds)
        spec = spec._replace(image=bubblewrap.IMAGE)
        return Assembled(spec, wrap, group, isolation, homes, "/tmp")
    for name in ("workspace", "home", "tmp"):
        (staging / name).mkdir()
    spec = spec._replace(workdir=str(staging / "workspace"))
    homes = dict.fromkeys(homes, str(staging / "home"))
    return Assembled(spec, unwrapped, group, isolation, homes, str(staging / "tmp"))


def _check(wanted: Wanted, backend: Backend) -> None:
    if wanted.image is not None and not wanted.image.is_dir():
        raise SandboxError(f"the image {wanted.image} is not a directory", remedy="give a directory, or None")
    if not wanted.workdir.startswith("/") or os.path.normpath(wanted.workdir) == "/":
        raise SandboxError(f"the working directory {wanted.workdir!r} is not an absolute path below /")
    for source, target in wanted.binds.items():
        if not Path(source).exists():
            raise SandboxError(f"the bind {source} does not exist on the host")
        if backend == "plain" and source != target:
            raise SandboxUnavailableError(
                f"a plain box cannot show {source} as {target}", remedy="bind it to its own path"
            )


def _spec(
    wanted: Wanted, backend: Backend, staging: Path, storage: str, group: Group, *, overlay: bool
) -> Spec:
    image = wanted.image
    if image is None:
        image = staging / "empty"
        image.mkdir()
        overlay = False
    elif image.stat().st_uid != os.geteuid():
        overlay = False  # what others own can be copied by the box, but not changed in place
    limits = wanted.limits
    watch = {name: getattr(limits, name) for name in ("memory", "processes") if name not in group.keeps}
    if storage == "disk":
        watch["disk"] = limits.disk
    rlimit = backend != "plain" and "processes" not in group.keeps and os.geteuid() != 0
    entrances = [
        os.open(directory / "cgroup.procs", os.O_WRONLY | os.O_CLOEXEC) for directory in group.directories
    ]
    counted = (
        [os.open(staging, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)] if backend != "namespaces" else []
    )
    return Spec(
        *(wanted.name, backend, str(staging), str(lease_path(wanted.name)), wanted.workdir, str(image)),
        *(
            "overlay" if overlay else "copy",
            storage,
            dict(wanted.binds),
            limits.disk,
            limits.files,
            limits.seconds,
        ),
        *(watch, limits.processes if rlimit else None, entrances),
        *([str(directory) for directory in group.directories], counted),
    )


def _isolation(spec: Spec, group: Group) -> dict[str, str]:
    """Who keeps what apart, in words."""
    own = spec.kind != "plain"
    return {
        "files": "own root, host programs read-only"
        if own
        else "none: every file of this user can be read and changed",
        "processes": "own pid namespace"
        if own
        else "none: other processes of this user can be seen and signalled",
        "network": "own loopback only" if own else "none: the host's network",
        "privileges": "no capabilities" + (", system calls filtered" if seccomp.program() else ""),
        "users": "one user id, that of this process" + (", in its own user namespace" if own else ""),
        "workspace": spec.workspace,
        "memory": group.keeps.get("memory", "watchdog"),
        "process count": group.keeps.get("processes", "rlimit" if spec.processes is not None else "watchdog"),
        "disk": "size of its file system" if spec.storage == "memory" else "watchdog",
    }


def program_prefix(name: str) -> dict[str, str]:
    """The bind that shows a program's installation (the directory above its `bin`), where /usr does not hold
    it.
    """
    found = shutil.which(name)
    if found is None:
        return {}
    path = Path(found).resolve()
    prefix = path.parent.parent
    if path.parent.name != "bin" or prefix.is_relative_to("/usr") or prefix in (Path("/"), Path.home()):
        return {}
    return {str(prefix): str(prefix)}

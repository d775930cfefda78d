"""How `bwrap` starts a box's program: the same root as a namespaced box has, over directories on the host's
disk.

Invariant: the program is pid 1 of the box; of the host it sees what `box.layout` shows, read-only, and the
interpreter.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from slime.agent.sandbox.box.layout import ETC, FILES, PROC_HIDDEN, PROC_READ_ONLY, TOP
from slime.agent.sandbox.client import PROGRAM, Wrap

IMAGE = "/run/slime/image"
"""Where a bubblewrap box sees the image that its first process copies into the workspace."""

_WRITABLE = {
    "home": "/home/agent",
    "root": "/root",
    "tmp": "/tmp",
    "opt": "/opt",
    "var-tmp": "/var/tmp",
    "shm": "/dev/shm",
}


def wrapper(staging: Path, workdir: str, image: Path, binds: Mapping[str, str]) -> Wrap:
    """What turns the program's arguments into bwrap's."""
    places = {**_WRITABLE, "workspace": workdir}
    for name in places:
        (staging / name).mkdir()
    options = [
        shutil.which("bwrap") or "bwrap",
        "--unshare-all",
        "--unshare-user",
        "--disable-userns",
        "--as-pid-1",
        "--new-session",
    ]
    options += ["--uid", "0", "--gid", "0", "--hostname", "box", "--cap-drop", "ALL"]
    options += [*_host_parts(), *_own_files(staging), *_proc(), "--dev", "/dev"]
    for name, target in places.items():
        options += ["--bind", str(staging / name), target]
    for source, target in ((str(image), IMAGE), *_interpreter(), *binds.items()):
        options += ["--ro-bind", source, target]
    options += ["--remount-ro", "/", "--remount-ro", "/dev"]  # memory that no limit would count
    return lambda arguments: [*options, "--chdir", "/", "--", *arguments]


def _host_parts() -> list[str]:
    options = ["--ro-bind", "/usr", "/usr"]
    for name in (*TOP, *(f"etc/{each}" for each in ETC)):
        source = Path("/", name)
        if source.is_symlink():
            options += ["--symlink", str(source.readlink()), str(source)]
        elif source.exists():
            options += ["--ro-bind", str(source), str(source)]
    return options


def _proc() -> list[str]:
    options = ["--proc", "/proc"]
    for path in (Path("/proc", name) for name in PROC_READ_ONLY):
        if path.exists():
            options += ["--ro-bind", str(path), str(path)]
    for path in (Path("/proc", name) for name in PROC_HIDDEN):
        if path.is_dir():
            options += ["--tmpfs", str(path), "--remount-ro", str(path)]
        elif path.exists():
            options += ["--ro-bind", "/dev/null", str(path)]
    return options


def _own_files(staging: Path) -> list[str]:
    options = []
    for name, text in FILES.items():
        own = staging / "files" / name
        own.parent.mkdir(parents=True, exist_ok=True)
        own.write_text(text)
        options += ["--ro-bind", str(own), f"/{name}"]
    return options


def _interpreter() -> list[tuple[str, str]]:
    """The Python that runs the box's program, and the program, at their own paths."""
    places = {sys.base_prefix, sys.prefix, str(PROGRAM), os.path.realpath(sys.base_prefix)}
    return [(place, place) for place in sorted(places) if not place.startswith("/usr")]

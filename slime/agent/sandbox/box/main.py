"""Start of a box's program: `main(channel descriptor, spec descriptor)`.

As `namespaces` it makes user and pid namespaces, forks the box's first process into them, and stays outside
to clean up after it, whatever ends it. As `bubblewrap` or `plain` it is the first process itself.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
from pathlib import Path

from .cleanup import remove_cgroup, remove_tree
from .layout import build_root, copy_tree
from .processes import kill_tree
from .serve import Server, harden
from .syscalls import (
    CLONE_NEWCGROUP,
    CLONE_NEWIPC,
    CLONE_NEWNET,
    CLONE_NEWNS,
    CLONE_NEWPID,
    CLONE_NEWUSER,
    CLONE_NEWUTS,
    PR_SET_PDEATHSIG,
    bring_up_loopback,
    prctl,
    unshare,
)
from .wire import Spec, send


def main(channel_descriptor: int, spec_descriptor: int) -> None:
    """Run the box; returns when it has ended and nothing of it is left."""
    with os.fdopen(spec_descriptor, "rb") as file:
        spec = Spec.load(file.read())
    channel = socket.socket(fileno=channel_descriptor)
    for descriptor in (channel_descriptor, *spec.join, *spec.counted):
        os.set_inheritable(descriptor, False)
    try:
        if spec.kind == "namespaces":
            _hold(spec, channel)
        else:
            _serve_here(spec, channel)
    except OSError as error:
        with contextlib.suppress(OSError):  # the owner may be gone
            send(channel, {"failed": str(error)})


def _serve_here(spec: Spec, channel: socket.socket) -> None:
    """The first process of a bubblewrap or plain box."""
    image = os.open(spec.image, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    copy_tree(image, spec.workdir)
    workspace = os.open(spec.workdir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    harden()
    send(channel, {"ready": os.getpid()}, [image, workspace])
    try:
        Server(spec, channel, os.getppid() or None, spec.counted).serve()
    finally:
        kill_tree([os.getpid()])
        clean_up(spec)


def _hold(spec: Spec, channel: socket.socket) -> None:
    """The parent of a namespaced box."""
    owner, user, group = os.getppid(), os.geteuid(), os.getegid()
    unshare(CLONE_NEWUSER | CLONE_NEWPID)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {user} 1")
    Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    first = os.fork()
    if first == 0:
        _live(spec, channel)
    send(channel, {"first": first})
    channel.close()
    _wait(first, owner)
    clean_up(spec)


def _live(spec: Spec, channel: socket.socket) -> None:
    """The first process of a namespaced box. Never returns."""
    try:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        unshare(CLONE_NEWNS | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWCGROUP)
        socket.sethostname("box")
        bring_up_loopback()
        root = build_root(spec)
        harden()
        server = Server(spec, channel, None, [root.written])
        send(channel, {"ready": os.getpid()}, root.shown)
        server.serve()
    except OSError as error:
        with contextlib.suppress(OSError):  # the owner may be gone
            send(channel, {"failed": str(error)})
    os._exit(0)


def _wait(first: int, owner: int) -> None:
    """Until the box's first process has ended; a dead owner ends it."""
    watched = os.pidfd_open(first)
    poll = select.poll()
    poll.register(watched, select.POLLIN)
    while not poll.poll(1000):
        if os.getppid() != owner:
            os.kill(first, signal.SIGKILL)
    os.waitpid(first, 0)


def clean_up(spec: Spec) -> None:
    """Remove the box's groups, directory and lease."""
    for group in spec.cgroups:
        remove_cgroup(group)
    remove_tree(spec.staging)
    with contextlib.suppress(FileNotFoundError):
        Path(spec.lease).unlink()

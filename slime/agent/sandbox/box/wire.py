"""What the box's program and its owner say to each other: one specification, then small JSON messages.

A request's body travels in a memory file beside the message, so that its size is not bounded by the socket;
open files travel as descriptors.
"""

from __future__ import annotations

import json
import os
import socket
from typing import Any, NamedTuple

MAX_DESCRIPTORS = 8
Message = dict[str, Any]


class Spec(NamedTuple):
    """What a box is made of. Sizes are bytes, times seconds; `staging` is an empty directory of the box's
    own.

    A named tuple and not a dataclass: the import of `dataclasses` would be a quarter of the program's start.
    """

    id: str
    kind: str  # namespaces | bubblewrap | plain
    staging: str
    lease: str
    workdir: str
    image: str  # a directory; empty for none
    workspace: str  # overlay | copy
    storage: str  # memory | disk
    binds: dict[str, str]
    disk: int
    files: int
    seconds: float
    watch: dict[str, int]  # limits that no cgroup or file system keeps
    processes: int | None  # RLIMIT_NPROC of each program
    join: list[int]  # inherited descriptors of the cgroup.procs files that each program enters
    cgroups: list[str]  # directories to remove at the end
    counted: list[int]  # inherited descriptors of directories that the limit `disk` counts

    def dump(self) -> bytes:
        return json.dumps(self._asdict()).encode()

    @classmethod
    def load(cls, data: bytes) -> Spec:
        return cls(**json.loads(data))


def memory_file(data: bytes) -> int:
    """A descriptor of an anonymous file that holds `data`, at its beginning."""
    descriptor = os.memfd_create("slime", os.MFD_CLOEXEC)
    with os.fdopen(os.dup(descriptor), "wb") as file:
        file.write(data)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def send(channel: socket.socket, message: Message, descriptors: list[int] | None = None) -> None:
    """Send one message; its body as a memory file, first of the descriptors."""
    body = memory_file(json.dumps(message).encode())
    try:
        socket.send_fds(channel, [b"m"], [body, *(descriptors or [])])
    finally:
        os.close(body)


def receive(channel: socket.socket) -> tuple[Message, list[int]] | None:
    """The next message with its descriptors, or None at the end."""
    data, descriptors, _, _ = socket.recv_fds(channel, 16, MAX_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
    if not data:
        return None
    with os.fdopen(descriptors[0], "rb") as file:
        return json.loads(file.read()), descriptors[1:]

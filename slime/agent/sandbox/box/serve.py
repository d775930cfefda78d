"""The loop of a box's first process: starts programs, ends their trees, opens files and ports on the owner's
behalf.

Invariant: a program has no capability, no descriptor and no environment beyond what its request names, and
whatever it leaves behind stays below this process. The end of the channel, or of the box's time, ends the
box.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import stat
import time
from collections.abc import Callable
from pathlib import Path

from .processes import kill, kill_tree
from .programs import Programs
from .syscalls import (
    PR_SET_CHILD_SUBREAPER,
    PR_SET_DUMPABLE,
    PR_SET_NO_NEW_PRIVS,
    drop_bounding_set,
    drop_capabilities,
    open_beneath,
    prctl,
)
from .watch import Watch
from .wire import Message, Spec, receive, send

Reply = tuple[Message, list[int]]


class Server:
    """Answers one owner over one channel, until either ends."""

    def __init__(self, spec: Spec, channel: socket.socket, owner: int | None, counted: list[int]) -> None:
        self.spec = spec
        self.channel = channel
        self.owner = owner
        self.deadline = time.monotonic() + spec.seconds
        self.programs = Programs(spec, channel)
        self.watch = Watch(spec, counted)
        self.operations: dict[str, Callable[[Message, list[int]], Reply | None]] = {
            "run": self._run,
            "kill": self._kill,
            "open": self._open,
            "listen": self._listen,
            "limits": lambda message, descriptors: ({"limits": self.watch.hits}, []),
        }

    def serve(self) -> None:
        """Loop until the channel ends, the owner is gone, or the box's time is over."""
        wake_reader, wake_writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(wake_writer, warn_on_full_buffer=False)
        poll = select.poll()
        poll.register(self.channel, select.POLLIN)
        poll.register(wake_reader, select.POLLIN)
        while self._alive():
            ready = {descriptor for descriptor, _ in poll.poll(self.watch.interval * 1000)}
            if wake_reader in ready:
                os.read(wake_reader, 4096)
            self.programs.reap()
            if self.channel.fileno() in ready and not self._answer():
                return
            self.watch.look(self.programs.supervisors)

    def _alive(self) -> bool:
        adopted = self.owner is not None and os.getppid() != self.owner
        return time.monotonic() < self.deadline and not adopted

    def _answer(self) -> bool:
        """Answer one request; False at the end of the channel."""
        received = receive(self.channel)
        if received is None:
            return False
        message, descriptors = received
        try:
            reply = self.operations[message["do"]](message, descriptors)
        except OSError as error:
            reply = {"error": error.strerror or str(error), "errno": error.errno}, []
        finally:
            close_all(descriptors)
        if reply is not None:
            send(self.channel, {**reply[0], "id": message["id"]}, reply[1])
            close_all(reply[1])
        return True

    def _run(self, message: Message, descriptors: list[int]) -> Reply:
        return {"pid": self.programs.start(message, descriptors)}, []

    def _kill(self, message: Message, descriptors: list[int]) -> Reply:
        supervisor = message["pid"]
        kill(supervisor, signal.SIGSTOP)  # it must go on adopting until its tree is empty
        killed = kill_tree([supervisor])
        kill(supervisor, signal.SIGCONT if killed else signal.SIGKILL)  # it may not have forked yet
        return {"killed": killed}, []

    def _listen(self, message: Message, descriptors: list[int]) -> Reply:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("127.0.0.1", message["port"]))
            listener.listen(1024)
            return {"port": listener.getsockname()[1]}, [listener.detach()]

    def _open(self, message: Message, descriptors: list[int]) -> Reply | None:
        """Open a file as a program of the box would: in a child without privileges, which answers itself."""
        if (child := os.fork()) == 0:
            try:
                drop_capabilities()
                file = open_file(message, Path(self.spec.staging) if self.spec.kind == "plain" else None)
                send(self.channel, {"id": message["id"]}, [file])
            except OSError as error:
                send(self.channel, {"error": error.strerror, "errno": error.errno, "id": message["id"]})
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        return None


def open_file(message: Message, base: Path | None) -> int:
    """Open a regular file to read or (made with its directories) to write; inside `base` only, where there is
    one.
    """
    path, writes = str(message["path"]), bool(message["writes"])
    flags = os.O_NONBLOCK | os.O_CLOEXEC | (os.O_WRONLY | os.O_CREAT if writes else os.O_RDONLY)
    if base is None:
        if writes:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
        file = os.open(path, flags, 0o644)
    else:
        file = _open_inside(base, os.path.relpath(path, base), flags, writes)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        raise IsADirectoryError(21, "not a regular file")
    if writes:
        os.ftruncate(file, 0)
        if message.get("mode") is not None:
            os.fchmod(file, message["mode"])
    return file


def _open_inside(base: Path, relative: str, flags: int, writes: bool) -> int:
    """`open_beneath`, making the directories on the way; nothing on the way may lead out of `base`."""
    root = os.open(base, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    here = os.dup(root)
    *parents, _ = relative.split("/")
    for index, part in enumerate(parents if writes else ()):
        if part == "..":
            break
        with contextlib.suppress(FileExistsError):
            os.mkdir(part, dir_fd=here)
        os.close(here)
        here = open_beneath(
            root, "/".join(parents[: index + 1]), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, 0
        )
    return open_beneath(root, relative, flags, 0o644)


def close_all(descriptors: list[int]) -> None:
    """Close each descriptor."""
    for descriptor in descriptors:
        os.close(descriptor)


def harden() -> None:
    """What every program of the box inherits: no way to gain privileges, and no sight of this process."""
    prctl(PR_SET_DUMPABLE, 0)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    drop_bounding_set()

"""Programs of a box: each runs under a supervisor that adopts whatever it leaves behind, so that its tree is
known.

Invariant: the supervisor writes one line to the status descriptor: the exit code (128 + signal for a kill),
or `!` and the reason why the program could not start.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket

from . import seccomp
from .syscalls import PR_SET_CHILD_SUBREAPER, drop_capabilities, prctl
from .wire import Message, Spec

_STDIN, _STDOUT, _STDERR, _STATUS = range(4)


class Programs:
    """Starts and reaps; `supervisors` are the living ones."""

    def __init__(self, spec: Spec, channel: socket.socket) -> None:
        self.spec = spec
        self.channel = channel
        self.filter = seccomp.program()
        self.supervisors: set[int] = set()

    def start(self, message: Message, descriptors: list[int]) -> int:
        """Fork a supervisor with its program; returns the supervisor's pid."""
        supervisor = os.fork()
        if supervisor == 0:
            try:
                self._supervise(message, descriptors)
            finally:
                os._exit(1)  # whatever happens, this process does not go on as the box's first one
        self.supervisors.add(supervisor)
        return supervisor

    def reap(self) -> None:
        """Collect every child that has ended: supervisors, and what programs left behind."""
        while True:
            try:
                pid, _ = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self.supervisors.discard(pid)

    def _supervise(self, message: Message, descriptors: list[int]) -> None:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        prctl(PR_SET_CHILD_SUBREAPER, 1)
        self.channel.close()
        program = os.fork()
        if program == 0:
            self._become(message, descriptors)
        for descriptor in descriptors[:_STATUS]:
            os.close(descriptor)
        code = _wait_for(program)
        with contextlib.suppress(BrokenPipeError):  # the owner knew enough: the program could not start
            os.write(descriptors[_STATUS], f"{code}\n".encode())
        os._exit(0)

    def _become(self, message: Message, descriptors: list[int]) -> None:
        """Turn this process into the program. Never returns."""
        try:
            os.setsid()
            for entrance in self.spec.join:
                os.write(entrance, b"0")
            for number in (_STDIN, _STDOUT, _STDERR):
                os.dup2(descriptors[number], number)
            os.chdir(message["cwd"])
            self._restrict()
            os.execvpe(message["argv"][0], message["argv"], message["env"])
        except OSError as error:
            os.write(
                descriptors[_STATUS], f"!{error.strerror}: {error.filename or message['argv'][0]}\n".encode()
            )
        os._exit(127)

    def _restrict(self) -> None:
        for number in (signal.SIGPIPE, signal.SIGXFSZ):  # ignored by Python, and what is ignored stays so
            signal.signal(number, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if self.spec.processes is not None:
            resource.setrlimit(resource.RLIMIT_NPROC, (self.spec.processes, self.spec.processes))
        drop_capabilities()
        if self.filter is not None:
            seccomp.install(self.filter)


def _wait_for(program: int) -> int:
    """Reap children until the program is among them; its exit code as shells give it."""
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == program:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code

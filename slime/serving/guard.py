"""What a server runs under: ``python -I -S guard.py OWNER_PID PID_FD COMMAND...``. Standard library only.

Invariant: when the server ends, or its owner does, whoever was killed and how, every process that descends
from the server is gone. Two guards, one in the other, watch each other: one may be killed at any time, and
the other adopts what it leaves (both are child subreapers). SIGTERM is passed on to the server; SIGQUIT ends
all at once. Ends as the server did: with its exit code, or by its signal. Linux only.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_POLITE = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_OWNER_SIGNAL = signal.SIGUSR1
_HANDLED = (*_POLITE, signal.SIGQUIT, _OWNER_SIGNAL)
_KILL_SECONDS = 10.0
_NOT_STARTED = 127


def main(words: list[str]) -> int:
    """Run the command under two guards; returns its exit code."""
    owner, pid_fd, command = int(words[0]), int(words[1]), words[2:]

    def inner() -> int:
        return guarded(outer, lambda: _become(command, pid_fd))

    outer = os.getpid()
    return guarded(owner, inner)


def guarded(owner: int, run: Callable[[], int]) -> int:
    """Call `run` in a child, end with it as it did, and leave no descendant.

    Args:
        owner: process id of the parent, whose end ends everything.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, _HANDLED)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    _prctl(_PR_SET_PDEATHSIG, _OWNER_SIGNAL)
    if os.getppid() != owner:
        return _NOT_STARTED
    child = os.fork()
    if child == 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _HANDLED)
        os._exit(run())
    _handle_signals(owner, child)
    status = _wait_for(child)
    signal.pthread_sigmask(signal.SIG_BLOCK, _HANDLED)
    _kill_descendants()
    return _as_it_ended(status)


def _handle_signals(owner: int, child: int) -> None:
    def pass_on(number: int, _: object) -> None:
        _send(signal.SIGTERM, [child])

    def end_now(number: int, _: object) -> None:
        # The signal also comes when the thread of the owner ends that started us.
        if number != _OWNER_SIGNAL or os.getppid() != owner:
            _send(signal.SIGKILL, _descendants(os.getpid()))

    for number in _POLITE:
        signal.signal(number, pass_on)
    for number in (signal.SIGQUIT, _OWNER_SIGNAL):
        signal.signal(number, end_now)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _HANDLED)


def _become(command: list[str], pid_fd: int) -> int:
    """Replace this process, whose parent is the inner guard, by the server."""
    parent = os.getppid()
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return _NOT_STARTED
    os.write(pid_fd, str(os.getpid()).encode())
    os.set_inheritable(pid_fd, False)
    for ignored_by_python in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(ignored_by_python, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"cannot start {command[0]}: {error.strerror}", file=sys.stderr, flush=True)
        return _NOT_STARTED


def _wait_for(child: int) -> int:
    """Reap whatever ends until it is the child; returns its status."""
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == child:
            return status


def _kill_descendants() -> None:
    """Kill what is left, which are children by now or will be as their parents go, and reap it."""
    deadline = time.monotonic() + _KILL_SECONDS
    while time.monotonic() < deadline:
        _send(signal.SIGKILL, _descendants(os.getpid()))
        try:
            while os.waitpid(-1, os.WNOHANG) != (0, 0):
                pass
        except ChildProcessError:
            return
        time.sleep(0.005)
    print(f"processes that cannot be killed: {_descendants(os.getpid())}", file=sys.stderr, flush=True)


def _send(number: int, pids: list[int]) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def _descendants(root: int) -> list[int]:
    """Process ids below `root`, as they are now."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            parent = _parent_of(folder)
            children.setdefault(parent, []).append(int(folder.name))
    found = list(children.get(root, ()))
    for pid in found:
        found += children.get(pid, ())
    return found


def _parent_of(folder: Path) -> int:
    try:
        # The name of the program, in parentheses, may hold anything.
        return int((folder / "stat").read_text(errors="replace").rpartition(")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return 0


def _as_it_ended(status: int) -> int:
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [-code])
        os.kill(os.getpid(), -code)
    return code


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value) != 0:
        raise OSError(ctypes.get_errno(), f"prctl {option}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

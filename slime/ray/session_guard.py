"""Ends a local Ray session with its driver: ``python -I -S session_guard.py SESSION_FOLDER
DRIVER_PID``. Standard library only.

Ray ends its server when the driver is killed, but its agents look for that server for a minute or more.
Invariant: when the driver is gone, whoever was killed and how, every process that writes into the session's
folder is gone soon after. The driver is gone when its end of our standard input is closed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_POLITE_SECONDS = 2.0
"""What Ray gets to end its processes itself."""
_KILL_SECONDS = 20.0
_ACCESS_MODE = 0o3


@contextmanager
def guarded_session(folder: str) -> Iterator[None]:
    """While the block runs, and after it, no process of the session outlives this one."""
    guard = subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, folder, str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield
    finally:
        guard.communicate()


def main(folder: str, driver: int) -> int:
    """Wait for the end of the driver, or of its block, then end the session."""
    sys.stdin.buffer.read()
    until = time.monotonic() + _POLITE_SECONDS
    while _writers(folder, driver) and time.monotonic() < until:
        time.sleep(0.05)
    until = time.monotonic() + _KILL_SECONDS
    while (left := _writers(folder, driver)) and time.monotonic() < until:
        for pid in left:
            _kill(pid)
        time.sleep(0.05)
    return 0


def _writers(folder: str, driver: int) -> list[int]:
    """Living processes that have a file below the folder open for writing, but the driver."""
    processes = [path for path in Path("/proc").iterdir() if path.name.isdecimal()]
    return [int(path.name) for path in processes if path.name != str(driver) and _writes(path, Path(folder))]


def _writes(process: Path, folder: Path) -> bool:
    try:
        return any(_is_written(link, folder) for link in (process / "fd").iterdir())
    except OSError:  # it has ended, or it is not ours
        return False


def _is_written(link: Path, folder: Path) -> bool:
    try:
        if folder not in link.readlink().parents:
            return False
        lines = (link.parents[1] / "fdinfo" / link.name).read_text().splitlines()
    except OSError:  # closed meanwhile
        return False
    flags = next(line.split()[1] for line in lines if line.startswith("flags:"))
    return int(flags, 8) & _ACCESS_MODE != os.O_RDONLY


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))

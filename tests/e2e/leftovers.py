"""What a run leaves behind: processes, and files in shared memory.

While this process is a subreaper, whatever a run starts and forgets becomes our child, with or without its
environment, in whichever session: nothing can hide by losing its parent.
"""

import contextlib
import ctypes
import os
import time
from pathlib import Path

import psutil

PR_SET_CHILD_SUBREAPER = 36
SHARED_MEMORY = "/dev/shm/"


class Leftovers:
    """What is there besides what was there before."""

    def __init__(self):
        self._before = _descendants()
        self._files = set()
        self._own = set()

    def own(self, child):
        """Declare a child that is waited for elsewhere."""
        self._own.add(child.pid)

    def look(self):
        """Note which files of shared memory the run holds; other programs of this machine have some, too."""
        for process in _descendants() - self._before:
            self._files |= _shared_memory(Path(f"/proc/{process.pid}"))

    def living(self):
        """Processes; the dead among those that we have adopted are reaped."""
        living = set()
        for process in _descendants() - self._before:
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.status() != psutil.STATUS_ZOMBIE:
                    living.add(process)
                elif process.ppid() == os.getpid() and process.pid not in self._own:
                    os.waitpid(process.pid, os.WNOHANG)
        return living

    def files(self):
        """Files that were held, and are still there."""
        return {path for path in self._files if Path(path).exists()}

    def told(self):
        """What is left, for a person."""
        lines = sorted(self.files())
        for process in self.living():
            with contextlib.suppress(psutil.NoSuchProcess):
                lines.append(f"{process.pid} {' '.join(process.cmdline())[:300]}")
        return "left behind:\n" + "\n".join(lines)


@contextlib.contextmanager
def nothing_left(seconds):
    """What the block starts is gone within some seconds of its end."""
    _be_subreaper(True)
    found = Leftovers()
    try:
        yield found
        end = time.monotonic() + seconds
        while found.living() or found.files():
            assert time.monotonic() < end, found.told()
            time.sleep(0.1)
    finally:
        _be_subreaper(False)


def _be_subreaper(on):
    assert ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, int(on)) == 0


def _descendants():
    return set(psutil.Process().children(recursive=True))


def _shared_memory(process):
    """Names of files of shared memory that a process has mapped or opened."""
    names = []
    with contextlib.suppress(OSError):
        names += [
            line.split(maxsplit=5)[5] for line in (process / "maps").read_text().splitlines() if "/" in line
        ]
    with contextlib.suppress(OSError):
        names += [os.readlink(link) for link in (process / "fd").iterdir()]  # noqa: PTH115 - may be no path
    return {name for name in names if name.startswith(SHARED_MEMORY) and not name.endswith(" (deleted)")}

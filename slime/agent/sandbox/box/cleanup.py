"""Removal of what a box leaves on the host: its control groups and its directory. Follows no link."""

from __future__ import annotations

import contextlib
import os
import stat
import time
from pathlib import Path


def remove_cgroup(path: str, seconds: float = 2.0) -> None:
    """Remove a control group once its last process has been collected."""
    deadline = time.monotonic() + seconds
    while Path(path).exists():
        try:
            Path(path).rmdir()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def remove_tree(path: str) -> None:
    """Remove a directory whatever the modes inside, following no link."""
    with contextlib.suppress(FileNotFoundError):
        for _, names, files, directory in os.fwalk(path, topdown=False):
            for name in files:
                os.unlink(name, dir_fd=directory)
            for name in names:
                link = stat.S_ISLNK(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode)
                (os.unlink if link else os.rmdir)(name, dir_fd=directory)
        Path(path).rmdir()

"""The change of a workspace as a patch in git's format: added, changed, deleted, binary files, links and
modes.

Directories are read through descriptors, one name at a time and following no link, so that nothing in a
workspace can make this process read elsewhere. Where there is an overlay only what its upper layer holds is
looked at. Source of the format: git-diff(1), "generating patch text with -p", and git's `diff.c` for binary
literals.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import NamedTuple

from slime.agent.sandbox.base import SandboxError
from slime.agent.sandbox.patch import Entry, file_patch

_REGULAR, _EXECUTABLE, _LINK = "100644", "100755", "120000"


class _Side(NamedTuple):
    """One directory on the way down: the image's, the workspace's, the upper layer's. None: not there."""

    old: int | None
    new: int | None
    upper: int | None


def tree_diff(
    old: int, new: int, upper: int | None = None, *, exclude: Sequence[str] = (), max_bytes: int = 64 << 20
) -> str:
    """The patch from the directory `old` to `new` (open descriptors), sorted by path.

    Raises:
        SandboxError: the patch, or a changed file, is longer than `max_bytes`.
    """
    patches: list[str] = []
    room = max_bytes
    for path, before, after in _changes(_Side(old, new, upper), "", exclude, max_bytes, whole=upper is None):
        patch = file_patch(path, before, after)
        room -= len(patch)
        if room < 0:
            raise SandboxError(
                f"the patch is longer than {max_bytes} bytes (at {path})", remedy="exclude built files"
            )
        patches.append(patch)
    return "".join(patches)


def _changes(
    side: _Side, prefix: str, exclude: Sequence[str], max_bytes: int, *, whole: bool
) -> Iterator[tuple[str, Entry | None, Entry | None]]:
    """Paths that may differ, with both their entries. `whole`: there is no upper layer that would narrow the
    search.
    """
    old_names, new_names = _names(side.old), _names(side.new)
    candidates = old_names | new_names
    if not whole:
        candidates = (old_names - new_names) | (_names(side.upper) & new_names)
    for name in sorted(candidates):
        path = f"{prefix}{name}"
        if any(fnmatchcase(path, pattern) or fnmatchcase(name, pattern) for pattern in exclude):
            continue
        before, after = _entry(side.old, name, path, max_bytes), _entry(side.new, name, path, max_bytes)
        if before != after and (before or after):
            yield path, before, after
        with _below(side, name) as inside:
            if inside.old is not None or inside.new is not None:
                yield from _changes(
                    inside, f"{path}/", exclude, max_bytes, whole=whole or inside.upper is None
                )


def _names(directory: int | None) -> set[str]:
    return set(os.listdir(directory)) if directory is not None else set()  # noqa: PTH208 (a descriptor)


@contextmanager
def _below(side: _Side, name: str) -> Iterator[_Side]:
    """The directories called `name`, where they are directories."""
    opened = [_open_directory(directory, name) for directory in side]
    try:
        yield _Side(*opened)
    finally:
        for descriptor in opened:
            if descriptor is not None:
                os.close(descriptor)


def _open_directory(parent: int | None, name: str) -> int | None:
    if parent is None:
        return None
    try:
        return _open(name, os.O_RDONLY | os.O_DIRECTORY, parent)
    except (FileNotFoundError, NotADirectoryError):
        return None


def _entry(parent: int | None, name: str, path: str, max_bytes: int) -> Entry | None:
    """A file or link; None for nothing, a directory, or what git does not know (sockets, pipes, devices)."""
    if parent is None:
        return None
    try:
        state = os.stat(name, dir_fd=parent, follow_symlinks=False)
        if stat.S_ISLNK(state.st_mode):
            return Entry(_LINK, os.fsencode(os.readlink(name, dir_fd=parent)))
        if not stat.S_ISREG(state.st_mode):
            return None
        with os.fdopen(_open(name, os.O_RDONLY | os.O_NONBLOCK, parent), "rb") as file:
            data = file.read(max_bytes + 1)
    except FileNotFoundError:
        return None  # gone in the meantime
    if len(data) > max_bytes:
        raise SandboxError(f"{path} is longer than {max_bytes} bytes", remedy="exclude it from the diff")
    return Entry(_EXECUTABLE if state.st_mode & 0o100 else _REGULAR, data)


def _open(name: str, flags: int, parent: int) -> int:
    """Open following no link; what its owner (this user) has locked against itself is unlocked."""
    flags |= os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return os.open(name, flags, dir_fd=parent)
    except PermissionError:
        handle = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
        try:
            os.chmod(f"/proc/self/fd/{handle}", 0o700)  # noqa: PTH101 (through the descriptor)
        finally:
            os.close(handle)
        return os.open(name, flags, dir_fd=parent)

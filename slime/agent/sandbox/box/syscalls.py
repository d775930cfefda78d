"""Linux calls that the standard library lacks: mounts, namespaces, privileges.

Every failure is an `OSError` that names the call. Knows nothing of boxes.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_NOATIME, MS_NODIRATIME, MS_BIND, MS_REC, MS_PRIVATE, MS_RELATIME = (
    1024,
    2048,
    4096,
    16384,
    1 << 18,
    1 << 21,
)
CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWUTS, CLONE_NEWIPC = 0x20000, 0x2000000, 0x4000000, 0x8000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_CAPBSET_DROP = 1, 4, 22, 24
PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT = 36, 38, 47
_PR_CAP_AMBIENT_CLEAR_ALL = 4
_CAPABILITY_VERSION_3 = 0x20080522
_MNT_DETACH = 2
_SYS_OPENAT2 = 437
_SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_RESOLVE_NO_MAGICLINKS, _RESOLVE_BENEATH = 2, 8

_libc = ctypes.CDLL(None, use_errno=True)


def _checked(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    """mount(2)."""
    texts = [text.encode() for text in (source, target, kind, data)]
    _checked(_libc.mount(texts[0], texts[1], texts[2], ctypes.c_ulong(flags), texts[3]), f"mount {target}")


def pivot_root_here() -> None:
    """Make the current directory (a mount point) the root, and let go of the old one."""
    number = _SYS_PIVOT_ROOT.get(os.uname().machine)
    if number is None:
        raise OSError(f"pivot_root: unknown machine {os.uname().machine}")
    _checked(_libc.syscall(number, b".", b"."), "pivot_root")
    _checked(_libc.umount2(b".", _MNT_DETACH), "umount of the old root")
    os.chdir("/")


def unshare(flags: int) -> None:
    """unshare(2)."""
    _checked(_libc.unshare(flags), f"unshare {flags:#x}")


def prctl(option: int, value: int, *more: int) -> None:
    """prctl(2), with up to three further arguments."""
    rest = [ctypes.c_ulong(each) for each in (*more, 0, 0, 0)[:3]]
    _checked(_libc.prctl(option, ctypes.c_ulong(value), *rest), f"prctl {option}")


def drop_bounding_set() -> None:
    """No program started from here on can gain a capability, whatever its user."""
    for capability in range(64):
        try:
            prctl(PR_CAPBSET_DROP, capability)
        except OSError:
            break  # past the kernel's last one, or not ours to drop: capset() below still empties the sets
    prctl(PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL)


def drop_capabilities() -> None:
    """Empty this process's effective, permitted and inheritable sets."""
    header = struct.pack("Ii", _CAPABILITY_VERSION_3, 0)
    _checked(_libc.capset(header, bytes(24)), "capset")


def bring_up_loopback() -> None:
    """Set the interface `lo` of the current network namespace up."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        request = struct.pack("16sH14x", b"lo", 0x1 | 0x40)  # IFF_UP | IFF_RUNNING
        fcntl.ioctl(control, 0x8914, request)  # SIOCSIFFLAGS


def open_beneath(base: int, path: str, flags: int, mode: int) -> int:
    """Open `path` below the directory `base`; no link or `..` leads out of it."""
    how = struct.pack(
        "QQQ", flags, mode if flags & os.O_CREAT else 0, _RESOLVE_BENEATH | _RESOLVE_NO_MAGICLINKS
    )
    return _checked(_libc.syscall(_SYS_OPENAT2, base, path.encode(), how, len(how)), f"open {path}")

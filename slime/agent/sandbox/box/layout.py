"""The root that a box sees: host programs read-only, everything else its own and inside one size limit.

Invariant: of the host only /usr (with /bin, /lib, ...), a short list below /etc, five devices, the image and
the declared binds are visible, and none of them can be written. Runs in the box's own mount namespace.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import NamedTuple

from .syscalls import (
    MS_BIND,
    MS_NOATIME,
    MS_NODEV,
    MS_NODIRATIME,
    MS_NOEXEC,
    MS_NOSUID,
    MS_PRIVATE,
    MS_RDONLY,
    MS_REC,
    MS_RELATIME,
    MS_REMOUNT,
    mount,
    pivot_root_here,
)
from .wire import Spec

TOP = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
ETC = (
    *(
        "alternatives",
        "ca-certificates",
        "ca-certificates.conf",
        "fonts",
        "ld.so.cache",
        "ld.so.conf",
        "ld.so.conf.d",
    ),
    *("localtime", "magic", "magic.mime", "mime.types", "os-release", "debian_version", "perl", "protocols"),
    *(
        "python3",
        "services",
        "ssl/certs",
        "ssl/openssl.cnf",
        "pki/tls/certs",
        "pki/ca-trust",
        "terminfo",
        "timezone",
    ),
)
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
_DIRECTORIES = (
    "etc",
    "dev/pts",
    "dev/shm",
    "proc",
    "run",
    "tmp",
    "var/tmp",
    "var/log",
    "root",
    "home/agent",
    "opt",
)
PROC_READ_ONLY = ("sys", "sysrq-trigger", "irq", "bus", "fs")
PROC_HIDDEN = ("kcore", "keys", "timer_list", "sched_debug", "kmsg", "latency_stats", "scsi", "acpi")
_ESCAPES = (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\"))  # of /proc/self/mountinfo
FILES = {
    "etc/passwd": "root:x:0:0:root:/root:/bin/bash\nagent:x:0:0:agent:/home/agent:/bin/bash\n"
    "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n",
    "etc/group": "root:x:0:\nagent:x:0:\nnogroup:x:65534:\n",
    "etc/hosts": "127.0.0.1 localhost box\n::1 localhost\n",
    "etc/hostname": "box\n",
    "etc/resolv.conf": "",
    "etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
}


class Root(NamedTuple):
    """Directory descriptors: `shown` (image, workspace, its upper layer if any), and where all writes end
    up.
    """

    shown: list[int]
    written: int


def build_root(spec: Spec) -> Root:
    """Make the root and enter it."""
    image = _directory(Path(spec.image))
    mount("none", "/", "", MS_REC | MS_PRIVATE)
    if spec.storage == "memory":
        options = f"size={spec.disk},nr_inodes={spec.files},mode=755"
        mount("slime", spec.staging, "tmpfs", MS_NOSUID | MS_NODEV, options)
    base = Path(spec.staging)
    written = _directory(base)
    for name in ("root", "upper", "work"):
        (base / name).mkdir()
    root = base / "root"
    mount(str(root), str(root), "", MS_BIND)
    _remount(root, read_only=False)
    _remount_read_only(_host_parts(root))  # at once: nothing below may write to the host through it
    _remount_read_only([_bind(Path(source), root, box) for source, box in sorted(spec.binds.items())])
    shown = _workspace(spec, image, base, root)
    _devices(root)
    _proc(root / "proc")
    os.chdir(root)
    pivot_root_here()
    return Root(shown, written)


def _host_parts(root: Path) -> list[Path]:
    """Skeleton, own files, and the host's programs. Returns what is to become read-only."""
    for name in _DIRECTORIES:
        (root / name).mkdir(parents=True)
    for name in ("tmp", "var/tmp", "dev/shm"):
        (root / name).chmod(0o1777)
    for name, text in FILES.items():
        (root / name).write_text(text)
    mounted = [_bind(Path("/usr"), root, "usr")]
    for name in (*TOP, *(f"etc/{each}" for each in ETC)):
        source, target = Path("/", name), root / name
        if source.is_symlink():
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(source.readlink())
        elif source.exists():
            mounted.append(_bind(source, root, name))
    return mounted


def _inside(root: Path, name: str) -> Path:
    """The path of `name` in the box, its parents made; a link that leads out of `root` is refused."""
    target = root / name.lstrip("/")
    if not target.resolve().is_relative_to(root):
        raise OSError(f"{name} leads out of the box's root")
    target.parent.mkdir(parents=True, exist_ok=True)
    return target


def _bind(source: Path, root: Path, name: str) -> Path:
    target = _inside(root, name)
    if source.is_dir():
        target.mkdir(exist_ok=True)
    else:
        target.touch()
    mount(str(source), str(target), "", MS_BIND | MS_REC)
    return target


def _workspace(spec: Spec, image: int, base: Path, root: Path) -> list[int]:
    """Mount or copy the image at the working directory."""
    workdir = _inside(root, spec.workdir)
    workdir.mkdir(exist_ok=True)
    if spec.workspace == "copy":
        copy_tree(image, str(workdir))
        return [image, _directory(workdir)]
    options = f"lowerdir=/proc/self/fd/{image},upperdir={base / 'upper'},workdir={base / 'work'},userxattr"
    mount("overlay", str(workdir), "overlay", MS_NOSUID | MS_NODEV, options)
    return [image, _directory(workdir), _directory(base / "upper")]


def _directory(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def copy_tree(source: int, target: str) -> None:
    """Copy an open directory's content with modes and times, links as links, owned by the copier."""
    os.fchdir(source)
    command = ["cp", "-R", "-P", "--reflink=auto", "--preserve=mode,timestamps,links", ".", target]
    if code := os.spawnvp(os.P_WAIT, "cp", command):
        raise OSError(f"copy of the image into the box: cp ended with {code}")


def _devices(root: Path) -> None:
    for name in _DEVICES:
        target = root / "dev" / name
        target.touch()
        mount(f"/dev/{name}", str(target), "", MS_BIND)
    mount(
        "devpts", str(root / "dev/pts"), "devpts", MS_NOSUID | MS_NOEXEC, "newinstance,ptmxmode=0666,mode=620"
    )
    links = {"ptmx": "pts/ptmx", "fd": "/proc/self/fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2"}
    for name, goal in links.items():
        (root / "dev" / name).symlink_to(goal)


def _proc(proc: Path) -> None:
    """A /proc of the box's processes only; no user namespaces inside, and no knobs of the host."""
    mount("proc", str(proc), "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    with contextlib.suppress(
        FileNotFoundError
    ):  # a kernel without the knob has no nested namespaces to bound
        (proc / "sys/user/max_user_namespaces").write_text("0")
    for name in PROC_READ_ONLY:
        if (proc / name).exists():
            mount(str(proc / name), str(proc / name), "", MS_BIND)
            _remount(proc / name, read_only=True)
    for name in PROC_HIDDEN:
        hidden = proc / name
        if hidden.is_dir():
            mount("hidden", str(hidden), "tmpfs", MS_RDONLY | MS_NOSUID | MS_NODEV, "size=0,mode=0")
        elif hidden.exists():
            mount("/dev/null", str(hidden), "", MS_BIND)


def _remount_read_only(targets: list[Path]) -> None:
    """Make each target, and whatever is mounted below it, read-only."""
    heads = tuple(f"{target}/" for target in targets)
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        point = line.split()[4]
        for code, character in _ESCAPES:
            point = point.replace(code, character)
        if f"{point}/".startswith(heads):
            _remount(Path(point), read_only=True)


def _remount(target: Path, *, read_only: bool) -> None:
    """Remount a bind, keeping the flags that an unprivileged mounter may not clear."""
    has = os.statvfs(target).f_flag
    flags = MS_BIND | MS_REMOUNT | MS_NOSUID | MS_NODEV | (MS_RDONLY if read_only else 0)
    flags |= has & (MS_RDONLY | MS_NOEXEC | MS_NOATIME | MS_NODIRATIME)
    if has & 4096:  # ST_RELATIME
        flags |= MS_RELATIME
    mount("none", str(target), "", flags)

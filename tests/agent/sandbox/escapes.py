"""Attempts to get out of a box or to take the machine with it, each as a property that must hold.

Run by the tests in their own process, and as a program (`python escapes.py [BACKEND]`) by an ordinary user's:
it needs the standard library and slime only. Prints one line per attempt.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from slime.agent.sandbox import (
    Limits,
    LocalSandbox,
    SandboxError,
    SandboxFileError,
    SandboxFileNotFoundError,
)
from slime.agent.sandbox.box.processes import all_pids
from slime.agent.sandbox.leases import read_leases

SMALL = Limits(memory=64 << 20, processes=64, disk=16 << 20, files=500, seconds=60)
FORK_BOMB = "import os, time\nwhile True:\n try: os.fork()\n except OSError: time.sleep(0.01)"
DAEMON = (
    "(setsid setsid sh -c 'exec sleep {tag}' >/dev/null 2>&1 &) ; (setsid env -i sleep {tag} &) ; sleep 0.2"
)


REQUIRE = sys.argv[1] if __name__ == "__main__" and len(sys.argv) > 1 else None


def box(limits: Limits = SMALL, **options) -> LocalSandbox:
    """A box of the backend under test."""
    return LocalSandbox(limits=limits, require=options.pop("require", REQUIRE), **options)


def own_leases() -> set[str]:
    """Boxes of this process: others may have theirs at the same time."""
    return {lease.id for lease in read_leases() if lease.owner == os.getpid()}


def tag() -> str:
    """A sleep time by which a process of this attempt is known in a process list."""
    return f"9{secrets.randbelow(10**6):06d}.5"


def with_argument(argument: str) -> list[int]:
    """Pids on the host whose command line has the argument."""
    found = []
    for pid in all_pids():
        try:
            if argument.encode() in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
                found.append(pid)
        except OSError:
            continue
    return found


async def until_number(count: int, argument: str) -> bool:
    """Whether they become so many within half a minute."""
    for _ in range(600):
        if len(with_argument(argument)) == count:
            return True
        await asyncio.sleep(0.05)
    return False


async def until_gone(argument: str) -> bool:
    """Whether all of them end within half a minute."""
    return await until_number(0, argument)


async def python(sb: LocalSandbox, code: str, **options: object) -> str:
    """Output of a Python program in the box, errors included."""
    result = await sb.exec(["/usr/bin/python3", "-c", code], **options)
    return result.stdout + result.stderr


async def host_files(sb: LocalSandbox) -> None:
    """The host's home, secrets, temporary files and processes' roots are not there."""
    with tempfile.NamedTemporaryFile(mode="w", suffix="secret") as file:
        file.write("host secret")
        file.flush()
        for path in (file.name, "/etc/shadow", "/root/.bashrc", f"/proc/{os.getpid()}/root{file.name}"):
            assert (await sb.exec(["cat", path])).code != 0, path
        assert (
            "secret" not in (await sb.exec("ls -A /tmp /home /root /run /var /mnt /srv 2>/dev/null")).stdout
        )
    for path in ("/proc/1/root/", "/proc/1/cwd/", "/proc/1/fd/3", "/proc/2/root/"):
        code, out, _ = await sb.exec(["ls", "-L", path])
        assert (code != 0, out) == (True, ""), (path, out)
    assert (await sb.exec("ls /sys 2>/dev/null")).stdout == ""


async def host_programs(sb: LocalSandbox) -> None:
    """What is shown of the host cannot be written, nor mounted anew, nor the kernel's settings."""
    for path in ("/usr/bin/x", "/usr/local/x", "/etc/ssl/certs/x", "/proc/sys/kernel/hostname"):
        assert (await sb.exec(f"echo 1 > {path}")).code != 0, path
    assert (await sb.exec("echo c > /proc/sysrq-trigger")).code != 0
    for command in ("mount -o remount,rw /usr", "mount -t tmpfs x /mnt", "umount /usr", "mknod /tmp/d b 8 0"):
        assert (await sb.exec(command)).code != 0, command
    assert (await sb.exec("chroot / true || unshare -Ur true || unshare -m true")).code != 0


async def privileges(sb: LocalSandbox) -> None:
    """No capability, none to be gained, and system calls are filtered."""
    status = dict(
        line.split(":\t")
        for line in (await sb.exec("cat /proc/self/status")).stdout.splitlines()
        if ":\t" in line
    )
    assert {status[name] for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {"0" * 16}
    assert status["NoNewPrivs"] == "1"
    assert status["Seccomp"] == "2"


async def host_ports(sb: LocalSandbox) -> None:
    """A port of the host is refused, and other families of sockets than the usual ones do not exist."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        for address in ("127.0.0.1", "10.0.0.1", "169.254.169.254", socket.gethostname()):
            code = f"import socket; socket.create_connection(({address!r}, {port}), 2); print('in')"
            assert "in" not in (await python(sb, code)).splitlines()
    abstract = socket.socket(socket.AF_UNIX)
    name = f"slime-{secrets.token_hex(8)}"
    with abstract:
        abstract.bind(f"\0{name}")
        abstract.listen()
        assert "refused" in await python(
            sb, f"import socket; socket.socket(socket.AF_UNIX).connect('\\0{name}')"
        )
    assert "not supported" in await python(sb, "import socket; socket.socket(40, socket.SOCK_STREAM)")


async def host_processes(sb: LocalSandbox) -> None:
    """Processes outside are neither seen nor signalled, and the box's own first process cannot be killed."""
    pids = [int(name) for name in (await sb.exec("ls /proc")).stdout.split() if name.isdigit()]
    assert len(pids) < 10
    victim = subprocess.Popen(["sleep", "60"])
    try:
        assert (await sb.exec(f"kill -9 {victim.pid}")).code != 0
        assert (await sb.exec(f"kill -9 {os.getpid()}")).code != 0
        await sb.exec("kill -9 1; kill -STOP 1; kill -TERM 1")
        assert (await sb.exec("kill -9 -1; echo still here")).code != 0
        assert victim.poll() is None
    finally:
        victim.kill()
        victim.wait()
    assert (await sb.exec("echo alive")).stdout == "alive\n"
    assert "denied" in (await sb.exec("cat /proc/1/environ; cat /proc/1/mem")).stderr


async def other_boxes(sb: LocalSandbox) -> None:
    """Nothing of another box is seen: files, processes, ports, shared memory."""
    async with box() as other:
        listener = await other.listen()
        port, mark = listener.getsockname()[1], tag()
        await other.exec(
            f"echo other > /tmp/other; echo other > /dev/shm/other; sleep {mark} >/dev/null 2>&1 &"
        )
        assert (await sb.exec("cat /tmp/other /dev/shm/other")).code != 0
        assert mark not in (await sb.exec("cat /proc/[0-9]*/cmdline | tr '\\0' ' '")).stdout
        assert "refused" in await python(
            sb, f"import socket; socket.create_connection(('127.0.0.1', {port}), 2)"
        )
        listener.close()


async def file_operations(sb: LocalSandbox) -> None:
    """Writing and reading files follows links inside the box only."""
    with tempfile.TemporaryDirectory() as outside:
        secret = Path(outside, "secret")
        secret.write_text("host")
        secret.chmod(0o666)
        Path(outside).chmod(0o777)
        await sb.exec(
            f"ln -sf {secret} link; ln -sfn {outside} folder; ln -sf /etc/shadow shadow; mkfifo pipe"
        )
        for path in (
            "link",
            "folder/secret",
            "shadow",
            f"../../../..{secret}",
            f"/proc/{os.getpid()}/root{secret}",
        ):
            try:
                text = await sb.read_file(path)
            except SandboxFileNotFoundError:
                continue
            raise AssertionError(f"{path}: {text}")
        with contextlib.suppress(SandboxFileError):
            await sb.write_file("folder/made", "x")
        with contextlib.suppress(SandboxFileError):
            await sb.write_file("link", "x")
        assert secret.read_text() == "host"
        assert not Path(outside, "made").exists()
    for path in ("pipe", "/dev/zero", "/tmp"):
        try:
            await sb.read_file(path)
        except SandboxFileError:
            continue
        raise AssertionError(path)


async def fork_bomb() -> None:
    """It stays within the limit, other boxes work on, and it is gone with its time."""
    async with box() as sb, box() as other:
        mark = tag()
        bomb = asyncio.create_task(sb.exec(["/usr/bin/python3", "-c", FORK_BOMB, mark], timeout=1.0))
        await asyncio.sleep(0.5)
        assert len(with_argument(mark)) <= SMALL.processes + 5
        assert (await other.exec("echo fine")).stdout == "fine\n"
        result = await bomb
        assert result.timed_out or result.limit
        assert await until_gone(mark)
        assert (await sb.exec("echo again")).stdout == "again\n"


async def memory_bomb() -> None:
    """It is killed and the result says why; the box lives on."""
    async with box() as sb:
        code = "b = []\nwhile True: b.append(bytearray(1 << 20))"
        result = await sb.exec(["/usr/bin/python3", "-c", code], timeout=20)
        assert result.oom
        assert result.code == 137
        assert (await sb.exec("echo again")).stdout == "again\n"


async def disk_filler() -> None:
    """Files end at the limit, in whatever directory and number, and host memory is not the way around it."""
    async with box() as sb:
        for place in (".", "/tmp", "/dev/shm", "/root", "/opt"):
            result = await sb.exec(f"dd if=/dev/zero of={place}/big bs=1M count=64; rm -f {place}/big")
            assert "No space left" in result.stderr, place
        assert "No space left" in (await sb.exec("for i in $(seq 600); do : > f$i; done")).stderr
        assert (await sb.exec("rm -f f*; echo ok > small")).code == 0
        try:
            await sb.write_file("big", b"x" * (32 << 20))
        except SandboxFileError:
            return
        raise AssertionError("a file larger than the disk was written")


async def sparse_file() -> None:
    """A file that claims to be huge does not fill this process's memory."""
    async with box() as sb:
        await sb.exec("truncate -s 1T huge")
        for read in (sb.read_file("huge"), sb.diff()):
            try:
                await read
            except SandboxError:
                continue
            raise AssertionError("it was read")


async def daemons() -> None:
    """What a command leaves behind, however detached, dies with the command's time, and with the box."""
    late, left = tag(), tag()
    async with box() as sb:
        result = await sb.exec(DAEMON.format(tag=late) + "; sleep 50", timeout=0.5)
        assert result.timed_out
        assert await until_gone(late)
        await sb.exec(DAEMON.format(tag=left))
        assert await until_number(2, left)
    assert not with_argument(left)


async def lifetime() -> None:
    """A box ends by itself when its time is over, whatever runs in it."""
    mark = tag()
    async with box(Limits(seconds=1.0)) as sb:
        try:
            await sb.exec(f"trap '' TERM INT HUP; sleep {mark}; sleep 30", timeout=30)
        except SandboxError as error:
            assert "time" in str(error)
        else:
            raise AssertionError("it outlived its time")
        assert await until_gone(mark)


IN_ONE_BOX = (host_files, host_programs, privileges, host_ports, host_processes, other_boxes, file_operations)
IN_OWN_BOXES = (fork_bomb, memory_bomb, disk_filler, sparse_file, daemons, lifetime)


async def main() -> None:
    """All attempts, for a process that has no test runner."""
    async with box() as sb:
        print("backend", sb.backend, sb.isolation)
        for attempt in IN_ONE_BOX:
            await attempt(sb)
            print("held", attempt.__name__)
    for attempt in IN_OWN_BOXES:
        if sb.backend == "bubblewrap" and attempt is disk_filler:
            continue  # its disk is kept by a watchdog, see test_backends
        started = time.monotonic()
        await attempt()
        print("held", attempt.__name__, f"{time.monotonic() - started:.1f} s", flush=True)


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))

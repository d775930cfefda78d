"""Choice of the backend: the strongest that works, said aloud where it is a weaker one, refused where it must
not be.
"""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PROGRAM = """
import asyncio, logging, sys
from slime.agent.sandbox import LocalSandbox
logging.basicConfig()
async def main():
    for _ in range(2):
        async with LocalSandbox(require=sys.argv[1] or None) as sb:
            print(sb.backend, sb.isolation["network"], (await sb.exec("echo works")).stdout)
asyncio.run(main())
"""


def run_without_namespaces(require):
    """Run the program where the kernel grants no further user namespace and there is no bwrap."""
    shell = 'echo 0 > /proc/sys/user/max_user_namespaces && echo taken && PATH=/usr/bin:/bin exec "$@"'
    command = ["unshare", "-Ur", "sh", "-c", shell, "sh", sys.executable, "-c", PROGRAM, require]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT)
    if not done.stdout.startswith("taken"):
        pytest.skip(f"this machine grants no user namespace to take away: {done.stderr}")
    return done


def test_without_namespaces_boxes_are_plain_and_one_warning_says_why():
    done = run_without_namespaces("")
    if "backend 'bubblewrap' does not work" not in done.stderr:
        pytest.skip("bwrap is installed setuid and works all the same")
    assert done.stdout.count("plain none: the host's network works") == 2, done.stderr
    assert done.stderr.count("backend 'namespaces' does not work here") == 1
    assert "unshare" in done.stderr


def test_required_namespaces_are_not_replaced_by_less():
    done = run_without_namespaces("namespaces")
    assert done.returncode != 0
    assert "SandboxUnavailableError" in done.stderr
    assert "works" not in done.stdout

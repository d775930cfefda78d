"""Nothing gets out of a box, and nothing in it takes the machine down: as this user, and as an ordinary
one.
"""

import asyncio
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from slime.agent.sandbox import SandboxUnavailableError
from slime.agent.sandbox.backends import choose
from tests.agent.sandbox import escapes

ROOT = Path(__file__).parents[3]


def require_namespaces():
    try:
        asyncio.run(choose("namespaces"))
    except SandboxUnavailableError as error:
        pytest.skip(str(error))


def test_a_box_shows_and_reaches_nothing_of_the_host_or_of_other_boxes():
    require_namespaces()

    async def attempt_all():
        async with escapes.box(require="namespaces") as sb:
            for attempt in escapes.IN_ONE_BOX:
                await attempt(sb)

    asyncio.run(attempt_all())


@pytest.mark.parametrize("attempt", escapes.IN_OWN_BOXES, ids=lambda attempt: attempt.__name__)
def test_limits_contain(attempt):
    require_namespaces()
    asyncio.run(attempt())


def run_as_nobody(*arguments, path="/usr/bin:/bin"):
    """Run the attempts as an ordinary user, with a Python that it can read."""
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("only root can become another user here, and by setpriv")
    if not Path("/usr/bin/python3").exists():
        pytest.skip("there is no /usr/bin/python3 that an ordinary user could run")
    user = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"]
    environment = {
        "PATH": path,
        "HOME": "/nonexistent",
        "PYTHONPATH": str(ROOT),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    command = [*user, "/usr/bin/python3", str(ROOT / "tests/agent/sandbox/escapes.py"), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


def test_the_same_holds_for_the_boxes_of_an_ordinary_user():
    done = run_as_nobody()
    if "ModuleNotFoundError" in done.stderr or "Permission denied" in done.stderr:
        pytest.skip(f"an ordinary user cannot read this checkout: {done.stderr[-300:]}")
    if "backend namespaces" not in done.stdout:
        pytest.skip(f"no user namespaces for an ordinary user: {done.stderr[-300:]}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("held") == len(escapes.IN_ONE_BOX + escapes.IN_OWN_BOXES)

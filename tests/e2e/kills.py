"""Kills whole runs without warning: driver, Ray, actors and engine at once, as a power failure would.

Every process of a run carries a mark in its environment, by which all of them are found, orphans too.
"""

import os
import random
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import psutil

from tests.e2e.conftest import ROOT

MARK = "SLIME_TEST_RUN"


class Life:
    """One process tree of `slime train`, from its start to its end or its kill."""

    def __init__(self, flags: list[str], log: Path) -> None:
        self.mark = uuid.uuid4().hex
        env = dict(os.environ) | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT), MARK: self.mark}
        command = [sys.executable, "-m", "slime.cli", "train", *flags]
        self.started = time.monotonic()
        self.log = log
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, cwd=ROOT, env=env
            )

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

    def age(self) -> float:
        """Seconds since its start."""
        return time.monotonic() - self.started

    def has_begun(self) -> bool:
        """Whether it has come to its first step."""
        return b"start-up check" in self.log.read_bytes()

    def kill(self) -> int:
        """SIGKILL to all processes, again until none is left; returns how many there were."""
        count = 0
        while found := marked(self.mark):
            for process in found:
                try:
                    process.kill()
                    count += 1
                except psutil.NoSuchProcess:
                    continue
            time.sleep(0.05)
        self.process.wait()
        return count


def marked(mark: str) -> list[psutil.Process]:
    """Processes that carry a mark, but not those that have ended and wait for their parent."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == mark:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def steps_logged(metrics: Path) -> int:
    """Rollout steps in a metrics file; the line that is being written does not count."""
    if not metrics.is_file():
        return 0
    whole = metrics.read_bytes().rpartition(b"\n")[0]
    return whole.count(b'"rollout/step"')


def live_and_die(life: Life, metrics: Path, rng: random.Random, *, start: float) -> str:
    """Kill a run at a random point; returns where, or ``ended`` where it came to its end before.

    One kill of four falls into the start of the run, the others into one of its next steps.

    Args:
        start: seconds that a start takes.
    """
    if rng.random() < 0.25:
        wait = rng.uniform(0, start)
        until(life, lambda: life.age() > wait)
        where = f"{wait:.1f} s after the start"
    else:
        steps, wait = rng.randint(0, 2), rng.uniform(0, 1.0)
        until(life, life.has_begun)
        goal = steps_logged(metrics) + steps
        until(life, lambda: steps_logged(metrics) >= goal)
        time.sleep(wait)
        where = f"{wait:.2f} s after step {goal}"
    if life.ended:
        return "ended"
    return f"{where}, {life.kill()} processes"


def until(life: Life, condition: Callable[[], bool]) -> None:
    """Wait for a condition, or the end of the run."""
    while not life.ended and not condition():
        time.sleep(0.01)


def until_gone(life: Life, seconds: float = 60.0) -> None:
    """Wait for the end of all processes of a run that has ended."""
    end = time.monotonic() + seconds
    while left := marked(life.mark):
        assert time.monotonic() < end, f"left behind: {left}"
        time.sleep(0.05)

"""Run a command and measure what its whole process tree uses, daemons of its own included."""

import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import psutil


@dataclass
class Usage:
    """CPU seconds, wall seconds and peak resident memory of a process tree."""

    cpu_s: float
    wall_s: float
    peak_rss_bytes: int
    returncode: int


def measure(command: list[str], log: Path, env: dict[str, str] | None = None, poll: float = 0.1) -> Usage:
    """Run `command` with its output in `log`; polls the tree, so each process is known to `poll` seconds."""
    started = time.perf_counter()
    cpu: dict[tuple[int, float], float] = {}
    peak = 0
    with log.open("w") as out:
        child = psutil.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=env)
        while child.poll() is None:
            peak = max(peak, _sample(child, cpu))
            time.sleep(poll)
    return Usage(sum(cpu.values()), time.perf_counter() - started, peak, child.returncode)


def _sample(root: psutil.Process, cpu: dict[tuple[int, float], float]) -> int:
    """Update the CPU seconds of each live process of the tree; returns their resident bytes."""
    resident = 0
    try:
        tree = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0
    for process in tree:
        try:
            times = process.cpu_times()
            cpu[process.pid, process.create_time()] = times.user + times.system
            resident += process.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return resident

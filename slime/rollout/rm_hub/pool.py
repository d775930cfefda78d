"""Worker processes for checks: a hung or crashed check loses its own process and nothing else.

One thread drives one process and owns its deadline, so event loops never block and several may share a pool.
Processes start at the first check, are replaced when killed, and die with the pool, its thread or the parent.
Invariant: a call returns the check's value or raises `RewardError`; it never waits past its deadline.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import json
import os
import queue
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slime.errors import RewardError
from slime.rollout.rm_hub.verdict import Invalid

START_TIMEOUT_S = 120.0
"""Deadline for a new process to import what a check needs (slow on a loaded machine)."""
EXIT_SECONDS = 3.0
"""What a process that closed its pipes gets to end, so that its exit status is known."""


@dataclass(frozen=True)
class _Job:
    function: str
    arguments: Sequence[Any]
    timeout_s: float
    place: str
    result: concurrent.futures.Future[Any] = field(default_factory=concurrent.futures.Future)


class RewardPool:
    """A fixed number of worker processes."""

    def __init__(self, num_workers: int) -> None:
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._num_workers = num_workers
        self._threads: list[threading.Thread] = []
        self._workers: list[_Worker] = []
        self._lock = threading.Lock()
        self._closed = False

    async def run(self, function: str, arguments: Sequence[Any], *, timeout_s: float, place: str) -> Any:
        """Run `function` (a dotted path) on JSON-able arguments in a worker process.

        Returns:
            Its value, or `Invalid` with it.

        Args:
            timeout_s: seconds from the start of the check; waiting for a free process does not count.
            place: names the sample in errors.

        Raises:
            RewardError: the check raised, hung or crashed, or the pool is closed.
        """
        job = _Job(function, arguments, timeout_s, place)
        with self._lock:
            if self._closed:
                raise RewardError("the reward pool is closed", place=place, reason="closed")
            self._start_threads()
            self._jobs.put(job)
        return await asyncio.wrap_future(job.result)

    def close(self) -> None:
        """Kill the processes; checks under way and waiting fail. May be called again."""
        with self._lock:
            self._closed = True
            for worker in self._workers:
                self._jobs.put(None)
                worker.close()
        for thread in self._threads:
            thread.join()

    @property
    def process_ids(self) -> list[int]:
        """Processes that run now."""
        processes = [worker.process for worker in self._workers]
        return [process.pid for process in processes if process is not None]

    def _start_threads(self) -> None:
        for number in range(len(self._threads), self._num_workers):
            worker = _Worker()
            thread = threading.Thread(
                target=self._drive, args=(worker,), name=f"reward-{number}", daemon=True
            )
            self._workers.append(worker)
            self._threads.append(thread)
            thread.start()

    def _drive(self, worker: _Worker) -> None:
        """Take jobs until the pool closes."""
        while (job := self._jobs.get()) is not None:
            if not job.result.set_running_or_notify_cancel():
                continue
            try:
                job.result.set_result(worker.check(job))
            except Exception as error:  # noqa: BLE001 - the worker loop: the caller gets the error
                job.result.set_exception(error)
        worker.forget_output()


class _Worker:
    """One process and its pipes; used by one thread, killed by any."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self._closed = False
        self._loaded: set[str] = set()
        self._lock = threading.Lock()
        self._stderr = tempfile.TemporaryFile("a+b")  # noqa: SIM115 - lives as long as the worker

    def check(self, job: _Job) -> Any:
        """The value of a check.

        Raises:
            RewardError: it raised, hung or crashed.
        """
        if self.process is None or self.process.poll() is not None:
            self._start(job)
        if job.function not in self._loaded:
            self._ask(job, None, START_TIMEOUT_S)
            self._loaded.add(job.function)
        return self._ask(job, job.arguments, job.timeout_s)

    def close(self) -> None:
        """Kill the process and start no other."""
        with self._lock:
            self._closed = True
            self._kill()

    def forget_output(self) -> None:
        """Close the file that holds what the process wrote to stderr."""
        self._stderr.close()

    def _start(self, job: _Job) -> None:
        with self._lock:
            if self._closed:
                raise RewardError("the reward pool was closed", place=job.place, reason="closed")
            self._kill()
            self._loaded.clear()
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "slime.rollout.rm_hub.worker", str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(path or str(Path.cwd()) for path in sys.path),
                },
                start_new_session=True,
                bufsize=0,
            )

    def _kill(self) -> None:
        if self.process is None:
            return
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()
        self.process = None

    def _ask(self, job: _Job, arguments: Sequence[Any] | None, timeout_s: float) -> Any:
        """Send a request (no arguments: only import) and wait for its answer."""
        process = self.process
        if process is None or process.stdin is None or process.stdout is None:
            raise RewardError("the reward pool was closed", place=job.place, reason="closed")
        self._stderr.truncate(0)
        request = json.dumps({"function": job.function, "arguments": arguments}).encode() + b"\n"
        deadline = time.monotonic() + timeout_s
        try:
            _send(process.stdin.fileno(), request, deadline)
            answer = json.loads(_receive(process.stdout.fileno(), deadline))
        except TimeoutError as error:
            what = f"did not finish within {timeout_s:g} s; its process was killed"
            raise self._lost(job, what, "timeout") from error
        except (OSError, EOFError, ValueError) as error:
            raise self._lost(job, f"lost its process{_exit_status(process)}", "crash") from error
        if "error" in answer:
            raise RewardError(
                f"{job.function} {answer['error']}", place=job.place, reason=answer.get("reason")
            )
        return Invalid(answer["value"], answer["invalid"]) if "invalid" in answer else answer["value"]

    def _lost(self, job: _Job, what: str, reason: str) -> RewardError:
        with self._lock:
            if self._closed:
                return RewardError("the reward pool was closed", place=job.place, reason="closed")
            self._kill()
        self._stderr.seek(0)
        said = self._stderr.read().decode(errors="replace").strip()[-500:]
        return RewardError(
            f"{job.function} {what}" + (f": {said}" if said else ""), place=job.place, reason=reason
        )


def _exit_status(process: subprocess.Popen[bytes]) -> str:
    """How a process that closed its pipes ended; empty if it lives on."""
    try:
        status = process.wait(timeout=EXIT_SECONDS)
    except subprocess.TimeoutExpired:
        return ""
    if status == -signal.SIGKILL:
        return " (killed from outside by SIGKILL, as the kernel does where memory ends)"
    return f" (killed by {signal.Signals(-status).name})" if status < 0 else f" (exit status {status})"


def _wait(fd: int, event: int, deadline: float) -> None:
    poller = select.poll()
    poller.register(fd, event)
    if not poller.poll(max(0.0, deadline - time.monotonic()) * 1000):
        raise TimeoutError


def _send(fd: int, data: bytes, deadline: float) -> None:
    os.set_blocking(fd, False)
    while data:
        _wait(fd, select.POLLOUT, deadline)
        data = data[os.write(fd, data) :]


def _receive(fd: int, deadline: float) -> bytes:
    """One line; an error at the end of the stream."""
    data = b""
    while not data.endswith(b"\n"):
        _wait(fd, select.POLLIN, deadline)
        chunk = os.read(fd, 1 << 16)
        if not chunk:
            raise EOFError("the process ended")
        data += chunk
    return data


_pools: dict[int, RewardPool] = {}
_pools_lock = threading.Lock()


def shared_pool(num_workers: int) -> RewardPool:
    """The process-wide pool of that size; made at the first call, closed at exit at the latest."""
    with _pools_lock:
        if not _pools:
            atexit.register(close_shared_pools)
        if num_workers not in _pools:
            _pools[num_workers] = RewardPool(num_workers)
        return _pools[num_workers]


def close_shared_pools() -> None:
    """Kill all reward processes of this process; a later check starts new ones."""
    with _pools_lock:
        pools = list(_pools.values())
        _pools.clear()
    for pool in pools:
        pool.close()

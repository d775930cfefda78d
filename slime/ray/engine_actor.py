"""An engine as an actor, or one node's part of it: owns the server process.

Invariant: it speaks of the process only: which weights the engine has, and who asks it, others decide.
"""

from __future__ import annotations

import json
import threading
import urllib.request
from pathlib import Path

from slime.observability.doctor import patient_of_environment
from slime.ray.ports import first_free, own_address
from slime.rollout.loop import run_blocking
from slime.serving.engine_specs import EngineSpec
from slime.serving.launch import LaunchSettings, Stand, start_engine
from slime.serving.server_process import ServerProcess
from slime.utils.engine_client import EngineClient


class EngineActor:
    """Starts an engine and watches it.

    No method is a coroutine: Ray would then run all of them on one event loop, and `watch` would block it.
    """

    def __init__(self, settings: LaunchSettings, spec: EngineSpec, log_file: str) -> None:
        self._settings = settings
        self._spec = spec
        self._log_file = Path(log_file)
        self._ready = threading.Event()
        self._patient = patient_of_environment(self.describe)
        self._process: ServerProcess

    def address(self) -> str:
        """IP address of this machine."""
        return own_address()

    def free_ports(self, start: int, count: int) -> int | None:
        """First port of so many in a row that are free on this machine."""
        return first_free(start, count)

    def start(self, stand: Stand) -> str:
        """Start the engine; returns its base URL.

        Raises:
            EngineError: it did not start; holds the end of its log.
        """
        running = start_engine(self._spec, self._settings, stand=stand, log_file=self._log_file)
        self._process = running.process
        self._ready.set()
        return self._process.url

    def watch(self) -> str:
        """Lasts as long as the engine; returns how it ended."""
        self._ready.wait()
        return self._process.wait_for_exit()

    def describe(self) -> str:
        """What the engine has in flight, as it says itself."""
        if not self._ready.is_set():
            return "the engine is starting"
        who = f"the engine process {self._process.pid}"
        if not self._process.is_alive:
            return f"{who} is gone"
        try:
            with urllib.request.urlopen(self._process.url + "/v1/loads", timeout=5.0) as answer:
                load = json.load(answer)["loads"][0]
        except (OSError, ValueError, LookupError) as error:
            return f"{who} does not tell its load: {error}"
        requests = f"{load['num_running_reqs']} requests running, {load['num_waiting_reqs']} waiting"
        return f"{who} at {self._process.url}: {requests}"

    def hold(self, release: bool) -> None:
        """Stop generating; with `release`, give up memory too: the trainer is about to need it."""
        run_blocking(_hold(EngineClient(self._process.url), release))

    def go_on(self, released: bool) -> None:
        """Generate again after `hold`, with the weights as they are."""
        run_blocking(_go_on(EngineClient(self._process.url), released))

    def log_tail(self) -> str:
        """The end of the engine's log."""
        return self._process.log_tail() if self._ready.is_set() else ""

    def stop(self) -> None:
        """End the process."""
        if self._ready.is_set():
            self._process.stop()


async def _hold(client: EngineClient, release: bool) -> None:
    await client.pause("abort")
    if release:
        await client.release_memory()


async def _go_on(client: EngineClient, released: bool) -> None:
    if released:
        await client.resume_memory()
    await client.resume()

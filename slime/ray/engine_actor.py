"""The engine as an actor: owns the child process of the embedded engine and its weights.

Invariant: the version that the engine reports is the version of the weights that it computes with: weights
change only between `pause` and `resume`, and every change sets a version. An engine that works while the
trainer does has a copy of the weights; else it computes with the trainer's own.
"""

from __future__ import annotations

import json
import threading
import time
import urllib.request
from dataclasses import replace
from pathlib import Path

from slime.config import Config
from slime.errors import ConfigError
from slime.observability.doctor import patient_of_environment
from slime.rollout.loop import run_blocking
from slime.serving.embedded.process import EngineProcess
from slime.utils.engine_client import EngineClient


class EngineActor:
    """Starts `slime serve` and moves weights into it.

    No method is a coroutine: Ray would then run all of them on one event loop, and `watch` would block it.
    """

    def __init__(self, config: Config, log_file: str, copies: bool) -> None:
        """`copies`: compute with a copy of the weights instead of the trainer's own."""
        self._config = config
        self._copies = copies
        self._log_file = Path(log_file)
        self._ready = threading.Event()
        self._patient = patient_of_environment(self.describe)

    def start(self) -> str:
        """Start the engine; returns its base URL.

        Raises:
            EngineError: it did not start; holds the end of its log.
        """
        model = self._config.model.hf_checkpoint
        if model is None:
            raise ConfigError("the engine needs a model", place="--hf-checkpoint")
        engine = self._config.engine
        if self._config.train.deterministic_mode:
            engine = replace(engine, enable_deterministic_inference=True)
        self._process = EngineProcess(model, engine, self._log_file)
        self._client = EngineClient(self._process.url)
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
        if not self._process.is_alive:
            return f"the engine process {self._process.pid} is gone"
        try:
            with urllib.request.urlopen(self._process.url + "/v1/loads", timeout=5.0) as answer:
                load = json.load(answer)["loads"][0]
        except (OSError, ValueError) as error:
            return f"the engine process {self._process.pid} does not answer: {error}"
        requests = f"{load['num_running_reqs']} requests running, {load['num_waiting_reqs']} waiting"
        return f"the engine process {self._process.pid} at {self._process.url}: {requests}"

    def hold(self) -> None:
        """Stop generating and give up key-value memory: the trainer is about to change the weights."""
        run_blocking(_hold(self._client))

    def update(self, weights_file: str, version: int) -> dict[str, float]:
        """Take the weights in the shared file as `version`, and go on generating; returns metrics."""
        started = time.perf_counter()
        update = _update_in_flight if self._copies else _update
        run_blocking(update(self._client, weights_file, version))
        return {"perf/update_weights_time": time.perf_counter() - started}

    def stop(self) -> None:
        """End the child process."""
        self._process.stop()


async def _hold(client: EngineClient) -> None:
    await client.pause("abort")
    await client.release_memory()


async def _update(client: EngineClient, weights_file: str, version: int) -> None:
    await client.pause("abort")
    await client.begin_weight_update()
    await client.update_weights_from_tensor(
        [weights_file], load_format="shared_memory", weight_version=str(version), flush_cache=True
    )
    await client.end_weight_update()
    await client.resume_memory()
    await client.resume()


async def _update_in_flight(client: EngineClient, weights_file: str, version: int) -> None:
    """What runs goes on behind the update with the keys and values that it has."""
    await client.pause("in_place")
    await client.begin_weight_update()
    await client.update_weights_from_tensor(
        [weights_file], load_format="shared_memory_copy", weight_version=str(version), flush_cache=True
    )
    await client.end_weight_update()
    await client.resume()

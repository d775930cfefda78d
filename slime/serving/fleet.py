"""A whole topology on this machine: its engines, and a router before each model.

Invariant: everything that `start` began is gone when `stop` returns, or when this process ends, in whatever
way; a server that dies is told once, with the end of its log. Knows nothing of training.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from slime.errors import EngineError, SlimeError
from slime.serving.engine_specs import EngineSpec, plan_engines, start_waves, with_encoders
from slime.serving.launch import LaunchSettings, RunningEngine, start_engine
from slime.serving.router import RouterClient, RouterPlan, start_router
from slime.serving.server_process import ServerProcess
from slime.serving.topology import ServedModel, Topology

logger = logging.getLogger(__name__)
FIND_SECONDS = 120.0


@dataclass(frozen=True)
class Death:
    """A server that ended by itself.

    Attributes:
        name: the engine's, or ``router of <model>``.
        report: how it ended, and the end of its log.
        engine: None for a router.
    """

    name: str
    report: str
    engine: RunningEngine | None = None


@dataclass(frozen=True, kw_only=True)
class RouterChoice:
    """The router of one model: one to be started, or one that runs already.

    Attributes:
        port: of one to be started; None for any.
    """

    plan: RouterPlan | None = None
    port: int | None = None
    running_url: str | None = None


class Fleet:
    """Starts, watches and ends the servers of a topology.

    Attributes:
        engines: those that run, in the order of the plan.
        routers: URL by model.
    """

    def __init__(
        self,
        topology: Topology,
        settings: LaunchSettings,
        choose_router: Callable[[ServedModel], RouterChoice],
    ) -> None:
        self.topology = topology
        self.engines: list[RunningEngine] = []
        self.routers: dict[str, str] = {}
        self._processes: dict[str, ServerProcess] = {}
        self._settings = settings
        self._choose_router = choose_router
        self._deaths: queue.SimpleQueue[Death] = queue.SimpleQueue()
        self._is_ending = False

    def start(self) -> None:
        """Start all engines, encoders first, then the routers.

        Raises:
            SlimeError: a server did not start; the others are ended by `stop`.
            OSError: its log cannot be written.
        """
        choices = {model.name: self._choose_router(model) for model in self.topology.models}
        for wave in start_waves(plan_engines(self.topology)):
            self._start_wave(wave)
        for model in self.topology.models:
            self._start_router(model, choices[model.name])

    def next_death(self) -> Death:
        """Wait for the next server that ends by itself."""
        return self._deaths.get()

    def drop(self, engine: RunningEngine) -> None:
        """Go on without an engine: no more requests go there."""
        self.engines.remove(engine)
        RouterClient(self.routers[engine.spec.model]).remove(engine.endpoint.url)

    def lacks(self, model: str, worker_type: str) -> bool:
        """Whether no engine of that type is left of a model."""
        left = (engine.spec for engine in self.engines)
        return not any(spec.model == model and spec.worker_type == worker_type for spec in left)

    def stop(self, timeout: float = 20.0) -> None:
        """End routers, then engines. A router that ran before runs on, without our engines."""
        self._is_ending = True
        for model, url in self.routers.items():
            if model not in self._processes:
                self._leave(url, model)
        _at_once(partial(router.stop, timeout) for router in self._processes.values())
        _at_once(partial(engine.process.stop, timeout) for engine in self.engines)

    def _leave(self, url: str, model: str) -> None:
        client = RouterClient(url)
        for engine in self.engines:
            if engine.spec.model == model and engine.spec.worker_type != "encoder":
                try:
                    client.remove(engine.endpoint.url)
                except SlimeError as error:
                    logger.warning("the router %s may still list our engines: %s", url, error)
                    return

    def _start_wave(self, wave: Sequence[EngineSpec]) -> None:
        encoders = [engine.endpoint for engine in self.engines if engine.spec.worker_type == "encoder"]
        results: queue.SimpleQueue[RunningEngine | Exception] = queue.SimpleQueue()

        def start(spec: EngineSpec) -> None:
            try:
                results.put(start_engine(with_encoders(spec, encoders), self._settings))
            except Exception as error:  # noqa: BLE001 - worker boundary: whoever waits raises it
                results.put(error)

        for spec in wave:
            # An interrupt ends this process and thereby what has not started yet.
            threading.Thread(target=start, args=(spec,), daemon=True).start()
        failures = []
        for _ in wave:
            result = results.get()
            if isinstance(result, Exception):
                failures.append(result)
                continue
            self.engines.append(result)
            self._watch(result.spec.name, result.process, result)
        if failures:
            raise failures[0]
        self.engines.sort(key=lambda engine: engine.spec.ordinal)

    def _start_router(self, model: ServedModel, choice: RouterChoice) -> None:
        workers = [
            engine.registration
            for engine in self.engines
            if engine.spec.model == model.name and engine.spec.worker_type != "encoder"
        ]
        if choice.plan is None:
            assert choice.running_url is not None
            client = RouterClient(choice.running_url)
            if not client.health():
                raise EngineError("no router answers there", place=choice.running_url)
            self.routers[model.name] = choice.running_url
            for worker in workers:
                client.register(worker, timeout=FIND_SECONDS)
            return
        log_file = self._settings.log_dir / f"{model.name}-router.log"
        process = start_router(choice.plan, log_file, workers=workers, port=choice.port)
        self.routers[model.name] = process.url
        self._processes[model.name] = process
        self._watch(process.name, process, None)

    def _watch(self, name: str, process: ServerProcess, engine: RunningEngine | None) -> None:
        def wait() -> None:
            report = process.wait_for_exit()
            if not self._is_ending:
                self._deaths.put(Death(name, report, engine))

        threading.Thread(target=wait, daemon=True).start()


def _at_once(calls: Iterable[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

"""The engines of a run as one object: started, watched, replaced, ended; registered at their routers.

Invariant: an engine that is lost is out of its router before anything else happens, and one that replaces it
is asked only after it was given weights (`join`). Runs in the driver's process; knows no trainer.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from slime.config.serving_sections import ServingConfig
from slime.errors import EngineError, SlimeError
from slime.ray.hands import Hands
from slime.ray.health import HealthMonitor, HealthTimes, RestartBudget
from slime.ray.layout import EngineSeat
from slime.ray.placement import Placement
from slime.ray.routers import Routers, host_and_port
from slime.ray.stands import Stands, log_name, part_name
from slime.serving.endpoint import EngineEndpoint
from slime.serving.engine_specs import EngineSpec, start_waves, with_encoders
from slime.serving.external import ExternalEngine
from slime.serving.launch import LaunchSettings, Stand

ACTOR = "slime.ray.engine_actor.EngineActor"
LOG_SECONDS = 5.0
"""What the actor of an engine that failed gets to give the end of its log."""
THREADS = 4
"""Of an engine's actor: `start` or `hold`, `watch`, questions about its ports and its log."""

SETTLE_SECONDS = 1.0
"""What killed a router may have killed engines: until that is known, the next router would wait for them."""


@dataclass
class Engine:
    """One engine of ours.

    Attributes:
        parts: its actors, one a node; the first answers requests.
        stands: where each listens; kept when it is replaced.
        ends: of each, a call that lasts as long as it does.
        lost: why it is gone; None while it is there.
    """

    spec: EngineSpec
    parts: list[Any] = field(default_factory=list)
    stands: list[Stand] = field(default_factory=list)
    ends: list[Any] = field(default_factory=list)
    endpoint: EngineEndpoint | None = None
    lost: str | None = None


class EnginePool:
    """Engines of one kind.

    Args:
        replaces: engines that are lost are replaced, --rollout-engine-restarts times each; else they end
            the run.
        placement: whose seats the engines take, in the order of `specs`; None where there are no GPUs.
        externals: engines of others, beside or instead of ours; one that is lost is not replaced.
        label: of the actors, before the engine's name.
    """

    def __init__(
        self,
        serving: ServingConfig,
        settings: LaunchSettings,
        specs: Sequence[EngineSpec],
        hands: Hands,
        routers: Routers | None,
        *,
        externals: Sequence[ExternalEngine] = (),
        replaces: bool = False,
        placement: Placement | None = None,
        label: str = "engine",
    ) -> None:
        self._serving, self._settings, self._hands, self._routers = serving, settings, hands, routers
        self._replaces, self._placement, self._label = replaces, placement, label
        self._engines = {spec.name: Engine(spec) for spec in specs}
        seats: Sequence[EngineSeat | None] = [None] * len(specs) if placement is None else placement.engines
        self._seats = dict(zip(self._engines, seats, strict=True))
        self._externals = {external.endpoint.name: external for external in externals}
        self._lost_externals: set[str] = set()
        self._stands = Stands(settings, hands, placement)
        self._budget = RestartBudget(serving.rollout_engine_restarts)
        self._failures: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
        self._health: HealthMonitor | None = None
        self._waves = list(start_waves(specs))
        self._starting: dict[str, dict[str, Any]] = {}

    @property
    def endpoints(self) -> tuple[EngineEndpoint, ...]:
        """Of the engines that are there, in their order."""
        ours = [e.endpoint for e in self._engines.values() if e.endpoint is not None and e.lost is None]
        others = [e.endpoint for n, e in self._externals.items() if n not in self._lost_externals]
        return (*ours, *others)

    def addresses(self) -> dict[str, tuple[str, int]]:
        """Host and port by model.

        Without routers, of the only engine.
        """
        if self._routers is not None:
            return self._routers.addresses()
        endpoint = self.endpoints[0]
        return {endpoint.model: host_and_port(endpoint.url)}

    @property
    def lost(self) -> tuple[str, ...]:
        """Names of the engines that are gone and not replaced yet."""
        return tuple(name for name, engine in self._engines.items() if engine.lost is not None)

    @property
    def actors(self) -> list[Any]:
        """All of them."""
        return [part for engine in self._engines.values() for part in engine.parts]

    def begin_start(self) -> None:
        """Let the first engines start, while other things do."""
        if self._waves:
            self._launch(self._waves.pop(0))

    def finish_start(self, *, awaits_weights: bool = True) -> None:
        """Wait until all engines answer, and let them join.

        Args:
            awaits_weights: whether a weight update comes, with which health checks begin (`resume_checks`);
                else they begin now.

        Raises:
            EngineError: one did not start; holds the end of its log.
        """
        self._arrive()
        while self._waves:
            self._launch(self._waves.pop(0))
            self._arrive()
        if self._replaces:
            self._health = self._monitor()
        for endpoint in self.endpoints:
            self.join(endpoint)
        if self._routers is not None:
            self._routers.start()
        if not awaits_weights:
            self.resume_checks()

    def hold(self, *, release: bool) -> None:
        """Our engines stop generating and, with `release`, give up memory.

        Raises:
            EngineError: one cannot; with `replaces`, it is lost instead.
        """
        self.pause_checks()
        self._each("hold of the engines", self._calls("hold", release))

    def go_on(self, *, released: bool) -> None:
        """Those of our engines that no weight update wakes generate again after `hold`.

        Raises:
            EngineError: as `hold`.
        """
        calls = self._calls("go_on", released, only_kept=True)
        self._each("engines that keep their weights", calls)

    def _each(self, what: str, calls: Mapping[str, Any]) -> None:
        for name, call in calls.items():
            try:
                self._hands.wait_all(what, {name: call})
            except SlimeError as error:
                if not self._replaces:
                    raise
                self.lose(name, error.message)

    def pause_checks(self) -> None:
        """Generation is about to stop; health checks ask only whether processes answer."""
        if self._health is not None:
            self._health.pause()

    def resume_checks(self) -> None:
        """Generation goes on."""
        if self._health is not None:
            self._health.resume()

    def poll(self) -> None:
        """Take note of engines that ended or failed; with `replaces`, they are lost from now on."""
        self._note_ends()
        if self._routers is not None and self._routers.has_died:
            time.sleep(SETTLE_SECONDS)
            self._note_ends()
        while not self._failures.empty():
            self.lose(*self._failures.get())
        for text in self._routers.poll() if self._routers is not None else ():
            self._hands.note(f"warning: {text}")

    def _note_ends(self) -> None:
        import ray

        ends = {end: name for name, e in self._engines.items() if e.lost is None for end in e.ends}
        if ends:
            done, _ = ray.wait(list(ends), num_returns=len(ends), timeout=0)
            for end in done:
                self.lose(ends[end], _how_it_ended(end))

    def lose(self, name: str, reason: str) -> None:
        """This engine is gone, or what it has is not known: nobody asks it any more, and it ends."""
        endpoint = next((one for one in self.endpoints if one.name == name), None)
        if endpoint is None:
            return
        if self._health is not None:
            self._health.forget(name)
        if self._routers is not None:
            self._routers.remove(endpoint)
        self._hands.note(f"warning: engine {name} is lost: {reason}")
        if endpoint.is_external:
            self._lost_externals.add(name)
        else:
            self._end(self._engines[name], reason)
        if not self.endpoints and not self.lost:
            raise EngineError(f"all engines are lost; the last one: {reason}", place=f"engine {name}")

    def replace(self) -> tuple[EngineEndpoint, ...]:
        """Start anew what is lost; the new engines have the weights of their folder, and join nobody yet.

        One that does not start is lost as before, with why.

        Raises:
            EngineError: an engine was replaced as often as it may be.
        """
        wanted = [self._engines[name] for name in self.lost]
        for engine in wanted:
            assert engine.lost is not None
            left = self._budget.take(engine.spec.name, engine.lost)
            self._hands.note(f"engine {engine.spec.name} is started again ({left} times more)")
            if self._placement is not None:
                self._seats[engine.spec.name] = self._placement.relocate(engine.spec.name)
        self._launch([engine.spec for engine in wanted])
        return tuple(endpoint for engine in wanted if (endpoint := self._replacement(engine)) is not None)

    def join(self, endpoint: EngineEndpoint) -> None:
        """Let requests go to an engine that has its weights, unless it was lost since it got them.

        Raises:
            SlimeError: its router does not find it healthy; with `replaces`, it is lost instead.
        """
        if endpoint not in self.endpoints:
            return
        try:
            if self._routers is not None:
                self._routers.add(endpoint, self._bootstrap_port(endpoint))
        except SlimeError as error:
            if not self._replaces:
                raise
            self.lose(endpoint.name, error.message)
            if endpoint.name in self._engines:  # its router may be waiting for what listens there
                self._engines[endpoint.name].stands = []
            return
        if self._health is not None:
            self._health.watch(endpoint)

    def stop_watching(self) -> None:
        """Engines are about to end on purpose."""
        if self._health is not None:
            self._health.stop()

    def leave(self) -> None:
        """Engines are about to end, and nobody asks them any more: routers of others let them go."""
        for text in self._routers.leave() if self._routers is not None else ():
            self._hands.note(f"warning: {text}")

    def close(self) -> None:
        """End the routers; the actors are ended by whoever made them."""
        if self._routers is not None:
            self._routers.close()

    def _end(self, engine: Engine, reason: str) -> None:
        import ray

        engine.lost = reason
        for part in engine.parts:
            ray.kill(part)

    def _bootstrap_port(self, endpoint: EngineEndpoint) -> int | None:
        if endpoint.name in self._externals:
            return self._externals[endpoint.name].bootstrap_port
        port = self._engines[endpoint.name].stands[0].bootstrap_port
        return port if endpoint.worker_type == "prefill" else None

    def _launch(self, specs: Sequence[EngineSpec]) -> None:
        for spec in specs:
            engine = self._engines[spec.name]
            engine.spec = with_encoders(spec, [e for e in self.endpoints if e.worker_type == "encoder"])
            engine.parts = [self._make(engine, part) for part in range(self._number_of_parts(spec.name))]
            if not (engine.stands and self._placement is None):  # as before, on one machine
                engine.stands = self._stands.find(spec.name, engine.parts)
            self._starting[spec.name] = {
                part_name(spec.name, index): part.start.remote(stand)
                for index, (part, stand) in enumerate(zip(engine.parts, engine.stands, strict=True))
            }

    def _arrive(self) -> None:
        """Wait for what was launched."""
        starting, self._starting = self._starting, {}
        calls = {part: call for parts in starting.values() for part, call in parts.items()}
        urls = dict(zip(calls, self._hands.wait_all("start of the engines", calls), strict=True))
        for name in starting:
            self._settle(self._engines[name], urls[name])

    def _replacement(self, engine: Engine) -> EngineEndpoint | None:
        """Wait for an engine that was launched anew."""
        calls = self._starting.pop(engine.spec.name)
        try:
            url = self._hands.wait_all("start of an engine", calls)[0]
        except SlimeError as error:
            self._hands.note(f"warning: engine {engine.spec.name} did not start again: {error.message}")
            self._end(engine, error.message)
            engine.stands = []  # its port may be what it failed by
            return None
        return self._settle(engine, url)

    def _settle(self, engine: Engine, url: str) -> EngineEndpoint:
        before = engine.endpoint
        engine.endpoint = replace(
            engine.spec.endpoint(url, self._settings.kind),
            incarnation=0 if before is None else before.incarnation + 1,
        )
        engine.lost = None
        if engine.stands[0].port is None:
            engine.stands = [Stand(port=host_and_port(url)[1])]
        return engine.endpoint

    def _make(self, engine: Engine, part: int) -> Any:
        spec, seat = engine.spec, self._seats[engine.spec.name]
        file = self._settings.log_dir / f"{log_name(self._label, spec.name, part, len(self._engines))}.log"
        placed = {} if self._placement is None or seat is None else self._placement.engine_options(seat, part)
        name = self._label if len(self._engines) == 1 else f"{self._label} {part_name(spec.name, part)}"
        actor = self._hands.make(
            name,
            ACTOR,
            THREADS,
            self._settings,
            spec,
            str(file),
            placed=placed,
            vital=not self._replaces,
        )
        if self._replaces:
            engine.ends = [*engine.ends[:part], actor.watch.remote()]
        return actor

    def _number_of_parts(self, name: str) -> int:
        seat = self._seats[name]
        return 1 if seat is None else len(seat.parts)

    def _calls(self, method: str, *arguments: Any, only_kept: bool = False) -> dict[str, Any]:
        """The same call at our engines that generate; `only_kept`: at those that keep their weights."""
        return {
            name: getattr(engine.parts[0], method).remote(*arguments)
            for name, engine in self._engines.items()
            if engine.lost is None
            and engine.spec.worker_type != "encoder"
            and not (only_kept and engine.spec.update_weights)
        }

    def _monitor(self) -> HealthMonitor:
        serving = self._serving
        times = HealthTimes(
            interval=serving.rollout_health_check_interval,
            timeout=serving.rollout_health_check_timeout,
            first_wait=serving.rollout_health_check_first_wait,
        )
        return HealthMonitor(
            (),
            lambda failure: self._failures.put((failure.engine, str(failure))),
            times,
            log_tail=self._log_tail,
        )

    def _log_tail(self, name: str) -> str:
        """Of an engine of ours; called on the monitor's thread."""
        import ray

        if name in self._externals:
            return ""
        return str(ray.get(self._engines[name].parts[0].log_tail.remote(), timeout=LOG_SECONDS))


def _how_it_ended(end: Any) -> str:
    """What the watch of an engine returned, or how its actor died."""
    from slime.ray.supervision import result_of

    try:
        return str(result_of("engine", end))
    except SlimeError as error:
        return error.message

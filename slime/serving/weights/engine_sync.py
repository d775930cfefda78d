"""`EngineSync`: the `WeightSync` that all ways of moving weights share: pause, send, continue, verify.

Invariant: an engine goes on generating only when it has the whole version and says so; every other one stays
paused and is named in the report, or, where others own it, in the error that ends the update. Each wait ends
by --update-timeout. Knows no way: that is a `Transport`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from slime.errors import ConfigError, EngineRequestError, SlimeError
from slime.serving.endpoint import EngineEndpoint
from slime.serving.weights.client import Deadline, WeightClient
from slime.serving.weights.crew import Call, Crew
from slime.serving.weights.outgoing import WireForm
from slime.serving.weights.probe import Probe
from slime.serving.weights.sync import UpdatePause, UpdateReport, WeightSource
from slime.serving.weights.transport import Transport, Update, drain
from slime.utils.capabilities import Capabilities

KEPT_MEMORY = ["kv_cache", "cuda_graph"]
"""What engines that gave up memory take back after an update; their weights, before it."""


class EngineSync:
    """Moves weights of one trainer into a pool of engines of one kind. Every rank of the trainer has one."""

    def __init__(
        self,
        source: WeightSource,
        transport: Transport,
        form: Callable[[WeightClient], WireForm],
        *,
        is_first: bool,
        timeout: float,
        probe: Probe | None = None,
    ) -> None:
        """See `make_weight_sync`.

        Args:
            form: asks an engine how it wants weights.
            probe: compares engines with the trainer after the first update of each.
        """
        self._source = source
        self._transport = transport
        self._form = form
        self._is_first = is_first
        self._timeout = timeout
        self._probe = probe
        self._endpoints: tuple[EngineEndpoint, ...] = ()
        self._wire: WireForm | None = None
        self._unproved: set[str] = set()
        self._known: dict[str, Capabilities] = {}

    def connect(self, endpoints: Sequence[EngineEndpoint]) -> None:
        """Use these engines from now on, of those given whose weights are the trainer's.

        Raises:
            ConfigError: engines of two kinds.
        """
        chosen = tuple(endpoint for endpoint in endpoints if endpoint.updates_weights)
        kinds = sorted({endpoint.kind for endpoint in chosen})
        if len(kinds) > 1:
            raise ConfigError(f"the pool has engines of several kinds: {', '.join(kinds)}", place="engines")
        if chosen == self._endpoints:
            return
        self._unproved |= {endpoint.name for endpoint in chosen if endpoint not in self._endpoints}
        self._endpoints, self._wire, self._known = chosen, None, {}
        self._transport.forget()

    def update(self, version: int, pause: UpdatePause, *, released: bool = False) -> UpdateReport:
        """Move the weights of the moment as policy `version`; a collective call of all ranks.

        Args:
            released: the engines gave up memory before; they take it back, weights first.

        Raises:
            ModelError: the weights are not those of the engines' model.
            CapabilityError: an engine cannot do what the way or the pause needs.
            DeadlineError: the trainer's own work took too long.
            SlimeError: what else fails in the trainer. The error names engines of others that stay paused.
        """
        if not self._endpoints:
            return UpdateReport(metrics={})
        if not self._is_first:
            with self._source.present():
                self._expected()
                self._transport.follow(self._source, version)
            return UpdateReport(metrics={})
        deadline = Deadline(self._timeout, "weight update (--update-timeout)")
        crew = Crew(self._endpoints, deadline, self._known)
        try:
            return self._update(crew, version, pause, released)
        finally:
            crew.close()

    def close(self) -> None:
        """Give up groups, files and shared memory."""
        self._transport.close()

    def _update(self, crew: Crew, version: int, pause: UpdatePause, released: bool) -> UpdateReport:
        started = time.perf_counter()
        form = self._wire_form(crew)
        weights = form.outgoing(self._source.weights()) if self._transport.takes_weights else iter(())
        update = Update(version, weights, crew, pause, form.sizes())
        with self._source.present(), _gone_through(update):
            expected = self._expected()
            self._transport.stage(update)
            crew.each("question for its pauses", lambda engine: engine.check_pause(pause))
            if crew.members:
                crew.deadline.check()
            paused = time.perf_counter()
            self._send(update, released)
        self._wake(update, released)
        ended = time.perf_counter()
        if expected is not None and self._probe is not None:
            self._probe.compare(crew, expected, self._transport.request_fields)
        metrics = {
            "perf/update_weights_time": ended - started,
            "perf/update_weights_pause_time": ended - paused,
            "perf/update_weights_bytes": float(update.sent_bytes),
        }
        return UpdateReport(metrics=metrics | update.metrics, failed=crew.failed)

    def _expected(self) -> list[float] | None:
        """What the trainer computes, where engines are to prove that they do; a collective call of all ranks,
        before the engines have their memory back.
        """
        if self._probe is None or not self._unproved:
            return None
        self._unproved.clear()
        return self._probe.expected()

    def _send(self, update: Update, released: bool) -> None:
        """Pause the engines and give them the weights."""
        crew, pause = update.crew, update.pause
        with _naming_the_paused(self._endpoints), _gone_through(update):
            crew.each("pause", lambda engine: engine.pause(pause))
            if pause != "in_place":  # requests that continue in place need the cache
                crew.each("flush of the cache", WeightClient.flush)
            if released:
                crew.each("memory of the weights", lambda engine: _take_back(engine, ["weights"]))
            self._in_session(crew, _begin)
            self._transport.send(update)

    def _wake(self, update: Update, released: bool) -> None:
        """Let engines that have the version go on."""
        crew = update.crew
        self._in_session(crew, lambda engine: engine.post("/end_weight_update", {}))
        if released:
            crew.each("memory of the cache", lambda engine: _take_back(engine, KEPT_MEMORY))
        self._verify(crew, update.version)
        crew.each("continuation", WeightClient.resume)

    def _wire_form(self, crew: Crew) -> WireForm:
        """What the engines want, asked once; the weights are gone through in the trainer's form without
        any.
        """
        if self._wire is None:
            forms = crew.each("question for its dtype", self._form)
            if not forms:
                return WireForm(None, None)
            self._wire = next(iter(forms.values()))
        return self._wire

    def _in_session(self, crew: Crew, call: Call) -> None:
        """Servers before 0.5.23 have no sessions, and take weights without."""
        if self._transport.has_session:
            crew.each("session", lambda engine: call(engine) if engine.able.weight_sessions else None)

    def _verify(self, crew: Crew, version: int) -> None:
        versions = crew.each("question for its version", lambda engine: engine.version)
        for engine in crew.members:
            if versions[engine.name] != str(version):
                crew.drop(engine, f"says that its weights are version {versions[engine.name]}, not {version}")


@contextmanager
def _gone_through(update: Update) -> Iterator[None]:
    """The weights are gone through to their end whatever happens."""
    try:
        yield
    finally:
        drain(update.weights)


@contextmanager
def _naming_the_paused(endpoints: Sequence[EngineEndpoint]) -> Iterator[None]:
    """Errors say what becomes of engines of others, which may have some of the weights.
    Ours end with the run.

    Raises:
        SlimeError: as it was. RuntimeError: torch's, in the words by which a lost rank is known.
    """
    urls = [endpoint.url for endpoint in endpoints if endpoint.is_external]
    if not urls:
        yield
        return
    after = f"engines at {', '.join(urls)} stay paused: restart them, or load a whole checkpoint into them"
    try:
        yield
    except SlimeError as error:
        remedy = f"{error.remedy}; {after}" if error.remedy else after
        raise type(error)(error.message, place=error.place, remedy=remedy) from error
    except (RuntimeError, OSError) as error:
        raise RuntimeError(f"{error}; {after}") from error


def _begin(engine: WeightClient) -> None:
    """Open a session; one that a trainer left open when it died is given up."""
    try:
        engine.post_weights("/begin_weight_update", {})
    except EngineRequestError:
        with contextlib.suppress(EngineRequestError):  # closed also where it refuses what came in it
            engine.post("/end_weight_update", {})
        engine.post_weights("/begin_weight_update", {})


def _take_back(engine: WeightClient, tags: list[str]) -> None:
    engine.post("/resume_memory_occupation", {"tags": tags})

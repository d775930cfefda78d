"""A deterministic engine whose answers a function gives, behind the real HTTP server: for tests and demos.

It honours abort, pause, limits, stops, weight versions and prefix reuse as the embedded engine does, and
injects faults on request. Invariant: one worker thread owns all state. Needs no torch and no model.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import math
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar

from slime.config.sections import EngineConfig
from slime.errors import EngineUnavailableError
from slime.serving.background import ServerHandle
from slime.serving.embedded.core import HEALTH_RID, EngineStats, Listener, PauseMode
from slime.serving.embedded.request import Request
from slime.serving.script import (
    Policy,
    Script,
    ScriptedAnswer,
    ScriptedCall,
    aborted,
    script_of,
    scripted_logprob,
    update_of,
)

if TYPE_CHECKING:
    import torch

__all__ = [
    "Policy",
    "ScriptedAnswer",
    "ScriptedCall",
    "ScriptedEngine",
    "ScriptedServer",
    "scripted_logprob",
    "start_scripted_server",
]

Result = TypeVar("Result")
_HISTORY = 256
_NOTHING = Script(token_ids=(), logprobs=(), ending={})


@dataclass(eq=False)
class _Run:
    """One request on its way; `versions` has one entry for each token that is out."""

    request: Request
    listener: Listener
    answer: ScriptedAnswer = field(default_factory=ScriptedAnswer)
    script: Script = _NOTHING
    due: float = 0.0
    cached: int = 0
    retractions: int = 0
    versions: list[str] = field(default_factory=list)


class ScriptedEngine:
    """An `EngineCore` without a model.

    Attributes:
        calls: every request that the policy was asked, in order; health probes are not among them.
        events: every change from outside, in order: ``pause:<mode>``, ``resume``, ``abort:<rid>``, ``flush``,
            ``weights:<version>:<copy|alias>:<tensors>``, ``version:<version>``, ``release``,
            ``resume_memory``.
        on_death: called when an answer's `die_after` strikes.
    """

    def __init__(
        self,
        policy: Policy,
        tokenizer: Any,
        *,
        model_path: str = "scripted",
        config: EngineConfig | None = None,
        context_length: int = 32768,
        takes_images: bool = False,
    ) -> None:
        self.model_path = model_path
        self.config = config or EngineConfig()
        self.tokenizer = tokenizer
        self.vocab_size = len(tokenizer)
        self.context_length = self.config.context_length or context_length
        self.model_config = SimpleNamespace(
            model_type="scripted", architectures=["ScriptedForCausalLM"], tie_word_embeddings=False
        )
        self.takes_images = takes_images
        self.tells_routes = False
        self.weight_version = "default"
        self.is_paused = False
        self.calls: list[ScriptedCall] = []
        self.events: list[str] = []
        self.on_death: Callable[[], None] = lambda: None
        self._policy = policy
        self._tasks: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._gate = threading.Lock()
        self._is_open = False
        self._waiting: list[_Run] = []
        self._running: list[_Run] = []
        self._history: list[Sequence[int]] = []
        self._totals = {"prefill_tokens": 0, "cached_tokens": 0, "decode_tokens": 0}
        self._worker = threading.Thread(target=self._work, name="scripted-engine", daemon=True)

    @property
    def is_alive(self) -> bool:
        """Whether the worker takes requests."""
        return self._is_open

    @property
    def stats(self) -> EngineStats:
        """Load now; the cache is made up: four contexts large."""
        used = sum(len(run.request.input_ids) + len(run.versions) for run in list(self._running))
        return EngineStats(
            running=len(self._running),
            waiting=len(self._waiting),
            used_tokens=used,
            reusable_tokens=sum(map(len, self._history)),
            capacity=self.config.max_total_tokens or 4 * self.context_length,
            **self._totals,
        )

    def start(self) -> None:
        """Start the worker."""
        self._is_open = True
        self._worker.start()

    def shutdown(self) -> None:
        """Abort what is in flight and end the worker."""
        if self._is_open:
            self._post(self._close)
        self._worker.join()

    def submit(self, request: Request, listener: Listener) -> None:
        """Queue a request; raises EngineUnavailableError when the worker is gone."""
        self._post(lambda: self._waiting.append(_Run(request, listener)))

    def abort(self, rid: str) -> None:
        """End one request early."""
        self._post(lambda: self._abort(rid))

    def abort_all(self) -> None:
        """End all requests early."""
        self._post(self._abort_all)

    def pause(self, mode: PauseMode) -> None:
        """Stop giving tokens."""
        self._call(lambda: self._pause(mode))

    def resume(self) -> None:
        """Go on after `pause`."""
        self._call(lambda: self._note("resume", is_paused=False))

    def flush_cache(self) -> bool:
        """Forget earlier prompts, unless requests run."""
        return self._call(self._flush)

    def update_weights(
        self,
        named_tensors: Iterable[tuple[str, torch.Tensor]],
        version: str,
        *,
        alias: bool,
        flush: bool,
    ) -> None:
        """Take note of a weight update: the tensors are counted, not kept."""
        self._call(lambda: self._update(len(list(named_tensors)), version, alias, flush))

    def set_weight_version(self, version: str) -> None:
        """Name the weights."""
        self._call(lambda: self._note(f"version:{version}", weight_version=version))

    def release_memory(self) -> None:
        """Take note."""
        self._call(lambda: self._note("release"))

    def resume_memory(self) -> None:
        """Take note."""
        self._call(lambda: self._note("resume_memory"))

    def _post(self, task: Callable[[], None]) -> None:
        with self._gate:
            if not self._is_open:
                raise EngineUnavailableError("the scripted engine is not running", place=self.model_path)
            self._tasks.put(task)

    def _call(self, task: Callable[[], Result]) -> Result:
        """Run `task` on the worker and wait for its result."""
        future: concurrent.futures.Future[Result] = concurrent.futures.Future()
        self._post(lambda: _settle(future, task))
        return future.result()

    # Everything below runs on the worker thread.

    def _work(self) -> None:
        while self._is_open:
            with contextlib.suppress(queue.Empty):
                self._tasks.get(timeout=self._idle_seconds())()
            if not self.is_paused:
                self._admit()
                self._advance()

    def _idle_seconds(self) -> float | None:
        due = min((run.due for run in self._running), default=math.inf)
        return None if self.is_paused or due == math.inf else max(due - time.monotonic(), 0.0)

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self.config.max_running_requests:
            run = self._waiting.pop(0)
            self._running.append(run)
            try:
                self._plan(run)
            except Exception as error:  # noqa: BLE001 - worker boundary: a broken policy fails its request only
                run.answer = ScriptedAnswer(error=(500, f"policy: {type(error).__name__}: {error}"))

    def _plan(self, run: _Run) -> None:
        ids = run.request.input_ids
        answer = run.answer = self._answer(run.request)
        run.script = script_of(answer, run.request.params, self.tokenizer)
        run.cached = self._reused(ids) if answer.cached_tokens is None else answer.cached_tokens
        run.due = math.inf if answer.hang else time.monotonic() + answer.delay
        self._history = [*self._history[1 - _HISTORY :], [*ids, *run.script.token_ids]]
        self._totals["prefill_tokens"] += len(ids) - run.cached
        self._totals["cached_tokens"] += run.cached

    def _answer(self, request: Request) -> ScriptedAnswer:
        if request.rid.startswith(HEALTH_RID):
            return ScriptedAnswer(token_ids=[0])
        call = ScriptedCall(
            number=len(self.calls),
            rid=request.rid,
            input_ids=tuple(request.input_ids),
            prompt=self.tokenizer.decode(request.input_ids),
            params=request.params,
            weight_version=self.weight_version,
            images=request.image_data,
        )
        self.calls.append(call)
        return self._policy(call)

    def _reused(self, ids: Sequence[int]) -> int:
        """Longest prefix in common with an earlier request; the last prompt token is always computed."""
        return min(max((_common(ids, earlier) for earlier in self._history), default=0), len(ids) - 1)

    def _advance(self) -> None:
        now = time.monotonic()
        for run in list(self._running):
            while run in self._running and run.due <= now:
                self._step(run, now)

    def _step(self, run: _Run, now: float) -> None:
        """Give one token, or the end."""
        if run.answer.error is not None and len(run.versions) >= run.answer.error_after:
            status, message = run.answer.error
            self._finish(run, aborted(message, status))
            return
        total = len(run.script.token_ids)
        if run.answer.die_after is not None and len(run.versions) >= min(run.answer.die_after, total):
            self._take_nothing_more()
            self.on_death()
            self._end_all("the engine's worker died")
            return
        if len(run.versions) < total:
            run.versions.append(self.weight_version)
            self._totals["decode_tokens"] += 1
        if len(run.versions) == total and run.answer.die_after is None:
            self._finish(run, run.script.ending)
        elif run.request.stream:
            self._tell(run, None)
        if run.answer.token_latency:
            run.due = now + run.answer.token_latency

    def _finish(self, run: _Run, reason: dict[str, Any]) -> None:
        (self._running if run in self._running else self._waiting).remove(run)
        self._tell(run, reason)

    def _tell(self, run: _Run, reason: dict[str, Any] | None) -> None:
        run.listener(
            update_of(
                run.request,
                run.script,
                self.tokenizer,
                versions=run.versions,
                weight_version=self.weight_version,
                finish_reason=reason,
                cached_tokens=run.cached,
                num_retractions=run.retractions,
                more_meta=run.answer.meta_info,
            )
        )

    def _note(self, event: str, **changes: Any) -> None:
        self.events.append(event)
        for name, value in changes.items():
            setattr(self, name, value)

    def _abort(self, rid: str) -> None:
        for run in [*self._running, *self._waiting]:
            if run.request.rid == rid:
                self._note(f"abort:{rid}")
                self._finish(run, aborted("Aborted"))

    def _abort_all(self) -> None:
        for run in [*self._running, *self._waiting]:
            self._abort(run.request.rid)

    def _pause(self, mode: PauseMode) -> None:
        self._note(f"pause:{mode}", is_paused=True)
        if mode == "abort":
            self._abort_all()
        if mode == "retract":
            for run in self._running:
                run.retractions += 1

    def _flush(self) -> bool:
        if self._running:
            return False
        self._note("flush", _history=[])
        return True

    def _update(self, count: int, version: str, alias: bool, flush: bool) -> None:
        how = "alias" if alias else "copy"
        self._note(f"weights:{version}:{how}:{count}", weight_version=version)
        if flush:
            self._history = []

    def _close(self) -> None:
        self._take_nothing_more()
        self._end_all("the engine was shut down")

    def _take_nothing_more(self) -> None:
        with self._gate:
            self._is_open = False

    def _end_all(self, reason: str) -> None:
        """Do what was asked before, and end all requests."""
        while not self._tasks.empty():
            self._tasks.get()()
        for run in [*self._running, *self._waiting]:
            self._finish(run, aborted(reason, 503))


class ScriptedServer(ServerHandle):
    """A scripted engine behind its HTTP server.

    Attributes:
        engine: for its `calls` and `events`.
    """

    def __init__(self, engine: ScriptedEngine, port: int = 0) -> None:
        self.engine = engine
        engine.on_death = self.kill
        super().__init__(engine, engine.config, port=port)


def start_scripted_server(
    policy: Policy,
    tokenizer: Any,
    *,
    model_path: str = "scripted",
    config: EngineConfig | None = None,
    context_length: int = 32768,
    takes_images: bool = False,
    port: int = 0,
) -> ScriptedServer:
    """Serve a scripted engine on the loopback interface, on threads of this process.

    Args:
        policy: called on the engine's thread, one call at a time.
        tokenizer: a Hugging Face tokenizer.
        takes_images: requests may hold images; they are told to the policy, and stand for no tokens.
        port: 0 takes a free one; that of a dead engine puts another into its place.

    Returns:
        A handle, also a context manager: `url`, `engine`, `stop()`, `kill()`.
    """
    engine = ScriptedEngine(
        policy,
        tokenizer,
        model_path=model_path,
        config=config,
        context_length=context_length,
        takes_images=takes_images,
    )
    return ScriptedServer(engine, port)


def _settle(future: concurrent.futures.Future[Result], task: Callable[[], Result]) -> None:
    try:
        future.set_result(task())
    except Exception as error:  # noqa: BLE001 - worker boundary: it is raised again where the caller waits
        future.set_exception(error)


def _common(ids: Sequence[int], others: Sequence[int]) -> int:
    pairs = zip(ids, others, strict=False)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(ids), len(others)))

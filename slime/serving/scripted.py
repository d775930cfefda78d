"""A deterministic engine whose answers a function gives, behind the real HTTP server: for tests and demos.

It honours abort, pause, limits, stops, weight versions and prefix reuse as the embedded engine does, and injects
faults on request. Invariant: one worker thread owns all state. Needs no torch and no model.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar

from slime.config.sections import EngineConfig
from slime.errors import EngineUnavailableError
from slime.serving.background import ServerHandle
from slime.serving.embedded.core import EngineStats, Listener, PauseMode
from slime.serving.embedded.request import Request, SamplingParams, Update

if TYPE_CHECKING:
    import torch

Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class ScriptedCall:
    """What a policy is asked.

    Attributes:
        number: 0 for the engine's first request, then counting.
        prompt: the decoded prompt, special tokens included.
    """

    number: int
    rid: str
    input_ids: tuple[int, ...]
    prompt: str
    params: SamplingParams
    weight_version: str


@dataclass(frozen=True, kw_only=True)
class ScriptedAnswer:
    """What a policy answers. Limits and stops of the request apply to it as to sampled tokens.

    Attributes:
        text: the answer; encoded, with the end-of-sequence token behind it where `ends`.
        token_ids: the answer as ids, taken as they are; `text` and `ends` are then ignored.
        logprobs: one per token; None makes them up from the ids (`scripted_logprob`).
        cached_tokens: None counts the longest prefix in common with earlier requests.
        delay: seconds before the first token.
        token_latency: seconds between tokens.
        error: answer with this HTTP status and message instead.
        hang: never answer; only an abort ends it.
        die_after: the engine's worker dies after so many tokens, and its connections with it.
    """

    text: str = ""
    token_ids: Sequence[int] | None = None
    ends: bool = True
    logprobs: Sequence[float] | None = None
    cached_tokens: int | None = None
    delay: float = 0.0
    token_latency: float = 0.0
    error: tuple[int, str] | None = None
    hang: bool = False
    die_after: int | None = None


Policy = Callable[[ScriptedCall], ScriptedAnswer]


def scripted_logprob(token: int) -> float:
    """The made-up natural log-prob of a token: a fixed value in [-0.8, -0.1]."""
    return -(1 + token % 8) / 10


@dataclass(eq=False)
class _Run:
    """One request on its way."""

    request: Request
    listener: Listener
    answer: ScriptedAnswer = field(default_factory=ScriptedAnswer)
    planned: list[int] = field(default_factory=list)
    ending: dict[str, Any] = field(default_factory=dict)
    due: float = 0.0
    cached: int = 0
    retractions: int = 0
    versions: list[str] = field(default_factory=list)


class ScriptedEngine:
    """An `EngineCore` without a model.

    Attributes:
        calls: every request that the policy was asked, in order.
        events: every change from outside, in order: ``pause:abort``, ``resume``, ``abort:<rid>``, ``flush``,
            ``weights:<version>``, ``release``, ``resume_memory``.
        weight_shapes: what weight updates are checked against; may be set.
    """

    def __init__(
        self,
        policy: Policy,
        tokenizer: Any,
        *,
        model_path: str = "scripted",
        config: EngineConfig | None = None,
        context_length: int = 32768,
    ) -> None:
        self.model_path = model_path
        self.config = config or EngineConfig()
        self.tokenizer = tokenizer
        self.vocab_size = len(tokenizer)
        self.context_length = self.config.context_length or context_length
        self.model_config = SimpleNamespace(
            model_type="scripted",
            architectures=["ScriptedForCausalLM"],
            vocab_size=self.vocab_size,
            tie_word_embeddings=False,
        )
        self.weight_version = "default"
        self.weight_shapes: Mapping[str, tuple[int, ...]] = {}
        self.is_paused = False
        self.calls: list[ScriptedCall] = []
        self.events: list[str] = []
        self.on_death: Callable[[], None] = lambda: None
        self._policy = policy
        self._tasks: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._waiting: list[_Run] = []
        self._running: list[_Run] = []
        self._history: list[list[int]] = []
        self._totals = {"prompt": 0, "cached": 0, "output": 0}
        self._ended = threading.Event()
        self._worker = threading.Thread(target=self._work, name="scripted-engine", daemon=True)

    @property
    def is_alive(self) -> bool:
        """Whether the worker runs."""
        return self._worker.is_alive() and not self._ended.is_set()

    @property
    def stats(self) -> EngineStats:
        """Load now; the cache is made up: four contexts large."""
        return EngineStats(
            num_running_reqs=len(self._running),
            num_waiting_reqs=len(self._waiting),
            num_used_tokens=sum(
                len(run.request.input_ids) + len(run.versions) for run in list(self._running)
            ),
            max_total_num_tokens=self.config.max_total_tokens or 4 * self.context_length,
            total_prompt_tokens=self._totals["prompt"],
            total_cached_tokens=self._totals["cached"],
            total_output_tokens=self._totals["output"],
        )

    def start(self) -> None:
        """Start the worker."""
        self._worker.start()

    def shutdown(self) -> None:
        """Abort what is in flight and end the worker."""
        if self.is_alive:
            self._tasks.put(self._end)
            self._worker.join()

    def submit(self, request: Request, listener: Listener) -> None:
        """Queue a request; raises EngineUnavailableError when the worker is gone."""
        self._post(lambda: self._waiting.append(_Run(request, listener)))

    def abort(self, rid: str) -> None:
        """End one request early."""
        if self.is_alive:
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
        version: str | None,
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
        if not self.is_alive:
            raise EngineUnavailableError("the scripted engine is not running", place=self.model_path)
        self._tasks.put(task)

    def _call(self, task: Callable[[], Result]) -> Result:
        """Run `task` on the worker and wait for its result."""
        future: concurrent.futures.Future[Result] = concurrent.futures.Future()
        self._post(lambda: future.set_result(task()))
        while True:
            try:
                return future.result(timeout=0.1)
            except TimeoutError:
                if not self.is_alive:
                    raise EngineUnavailableError("the scripted engine died", place=self.model_path) from None

    def _note(self, event: str, **changes: Any) -> None:
        self.events.append(event)
        for name, value in changes.items():
            setattr(self, name, value)

    # Everything below runs on the worker thread.

    def _work(self) -> None:
        while not self._ended.is_set():
            try:
                self._tasks.get(timeout=self._idle_seconds())()
            except queue.Empty:
                pass
            if not self.is_paused:
                self._admit()
                self._advance()

    def _idle_seconds(self) -> float | None:
        if self.is_paused:
            return None
        due = min((run.due for run in self._running), default=math.inf)
        return None if due == math.inf else max(due - time.monotonic(), 0.0)

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self.config.max_running_requests:
            run = self._waiting.pop(0)
            self._running.append(run)
            try:
                self._plan(run)
            except Exception as error:  # worker boundary: a broken policy fails its request, not the engine
                run.answer = ScriptedAnswer(error=(500, f"policy: {type(error).__name__}: {error}"))
                run.due = 0.0

    def _plan(self, run: _Run) -> None:
        request = run.request
        ids = tuple(request.input_ids)
        call = ScriptedCall(
            number=len(self.calls),
            rid=request.rid,
            input_ids=ids,
            prompt=self.tokenizer.decode(ids),
            params=request.params,
            weight_version=self.weight_version,
        )
        self.calls.append(call)
        answer = run.answer = self._policy(call)
        run.planned, run.ending = self._ending(answer, request.params)
        if answer.logprobs is not None and len(answer.logprobs) < len(run.planned):
            raise ValueError(f"{len(answer.logprobs)} logprobs for {len(run.planned)} tokens")
        run.cached = self._reused(ids) if answer.cached_tokens is None else answer.cached_tokens
        self._history = [*self._history[-255:], [*ids, *run.planned]]
        self._totals["prompt"] += len(ids)
        self._totals["cached"] += run.cached
        run.due = math.inf if answer.hang else time.monotonic() + answer.delay

    def _ending(self, answer: ScriptedAnswer, params: SamplingParams) -> tuple[list[int], dict[str, Any]]:
        """The tokens that the request will get, and its finish reason."""
        eos = self.tokenizer.eos_token_id
        ids = list(self._encoded(answer) if answer.token_ids is None else answer.token_ids)
        stops = params.stop_token_ids | (frozenset() if params.ignore_eos else {eos})
        for count, token in enumerate(ids[: params.max_new_tokens], start=1):
            matched = self._matched_string(ids[:count], params)
            if matched is not None or token in stops:
                return ids[:count], {"type": "stop", "matched": token if matched is None else matched}
        if len(ids) < params.max_new_tokens:
            return ids, {"type": "stop", "matched": None}
        return ids[: params.max_new_tokens], {"type": "length", "length": params.max_new_tokens}

    def _encoded(self, answer: ScriptedAnswer) -> list[int]:
        ids = list(self.tokenizer.encode(answer.text, add_special_tokens=False))
        return [*ids, self.tokenizer.eos_token_id] if answer.ends else ids

    def _matched_string(self, ids: list[int], params: SamplingParams) -> str | None:
        if not params.stop:
            return None
        text = self.tokenizer.decode(ids)
        return next((stop for stop in params.stop if stop in text), None)

    def _reused(self, ids: Sequence[int]) -> int:
        """Longest prefix in common with an earlier request; the last prompt token is always computed."""
        common = (len(os.path.commonprefix([list(ids), earlier])) for earlier in self._history)
        return min(max(common, default=0), len(ids) - 1)

    def _advance(self) -> None:
        now = time.monotonic()
        for run in list(self._running):
            while run in self._running and run.due <= now and not self._ended.is_set():
                self._step(run, now)

    def _step(self, run: _Run, now: float) -> None:
        """Give one token, or the end."""
        if run.answer.error is not None:
            status, message = run.answer.error
            self._finish(run, _aborted(message, status))
            return
        if run.answer.die_after is not None and len(run.versions) >= run.answer.die_after:
            self._die()
            return
        if len(run.versions) < len(run.planned):
            run.versions.append(self.weight_version)
            self._totals["output"] += 1
        if len(run.versions) == len(run.planned) and run.answer.die_after is None:
            self._finish(run, run.ending)
        elif run.request.stream:
            run.listener(self._update_of(run, None))
        run.due = now + run.answer.token_latency if run.answer.token_latency else run.due

    def _finish(self, run: _Run, reason: dict[str, Any]) -> None:
        (self._running if run in self._running else self._waiting).remove(run)
        run.listener(self._update_of(run, reason))

    def _update_of(self, run: _Run, reason: dict[str, Any] | None) -> Update:
        request = run.request
        ids = run.planned[: len(run.versions)]
        given = run.answer.logprobs
        values = [scripted_logprob(token) for token in ids] if given is None else list(given[: len(ids)])
        tops = [self._top(token, value, request) for token, value in zip(ids, values, strict=True)]
        return Update(
            rid=request.rid,
            text=self._text(ids, request.params, reason),
            output_ids=ids,
            output_logprobs=values if request.return_logprob else [],
            input_logprobs=_input_logprobs(request),
            output_top_logprobs=tops if request.top_logprobs_num else [],
            input_top_logprobs=[],
            finish_reason=reason,
            prompt_tokens=len(request.input_ids),
            cached_tokens=run.cached,
            weight_version=self.weight_version,
            weight_versions=_spans(run.versions, self.weight_version),
            num_retractions=run.retractions,
        )

    def _top(self, token: int, value: float, request: Request) -> list[tuple[float, int]]:
        return [(value - k, (token + k) % self.vocab_size) for k in range(request.top_logprobs_num)]

    def _text(self, ids: list[int], params: SamplingParams, reason: dict[str, Any] | None) -> str:
        matched = (reason or {}).get("matched")
        if isinstance(matched, int) and not params.no_stop_trim:
            ids = ids[:-1]
        text: str = self.tokenizer.decode(ids, skip_special_tokens=params.skip_special_tokens)
        if isinstance(matched, str) and not params.no_stop_trim:
            text = text[: text.index(matched)]
        return text

    def _abort(self, rid: str) -> None:
        for run in [*self._running, *self._waiting]:
            if run.request.rid == rid:
                self.events.append(f"abort:{rid}")
                self._finish(run, _aborted("Aborted"))

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

    def _update(self, count: int, version: str | None, alias: bool, flush: bool) -> None:
        how = "alias" if alias else "copy"
        self._note(f"weights:{version}:{how}:{count}", weight_version=version or self.weight_version)
        if flush:
            self._history = []

    def _end(self) -> None:
        self._ended.set()
        for run in [*self._running, *self._waiting]:
            self._finish(run, _aborted("the engine was shut down", 503))

    def _die(self) -> None:
        self._ended.set()
        self.on_death()
        for run in [*self._running, *self._waiting]:
            self._finish(run, _aborted("the engine's worker died", 503))


class ScriptedServer(ServerHandle):
    """A scripted engine behind its HTTP server.

    Attributes:
        engine: for its `calls` and `events`.
    """

    def __init__(self, engine: ScriptedEngine) -> None:
        self.engine = engine
        engine.on_death = self.kill
        super().__init__(engine)


def start_scripted_server(
    policy: Policy,
    tokenizer: Any,
    *,
    model_path: str = "scripted",
    config: EngineConfig | None = None,
    context_length: int = 32768,
) -> ScriptedServer:
    """Serve a scripted engine on a free port of the loopback interface, on threads of this process.

    Args:
        policy: called on the engine's thread, one call at a time.
        tokenizer: a Hugging Face tokenizer.

    Returns:
        A handle, also a context manager: `url`, `engine`, `stop()`, `kill()`.
    """
    engine = ScriptedEngine(
        policy, tokenizer, model_path=model_path, config=config, context_length=context_length
    )
    return ScriptedServer(engine)


def _aborted(message: str, status: int | None = None) -> dict[str, Any]:
    return {"type": "abort", "message": message, "status_code": status, "err_type": None}


def _input_logprobs(request: Request) -> list[tuple[float | None, int]]:
    start = request.logprob_start_len
    if not request.return_logprob or start < 0:
        return []
    ids = request.input_ids[start:]
    return [(None, ids[0]), *((scripted_logprob(token), token) for token in ids[1:])]


def _spans(versions: Sequence[str], current: str) -> list[dict[str, Any]]:
    """Runs of equal versions as ``{"version", "start", "end"}``."""
    spans = [{"version": versions[0] if versions else current, "start": 0, "end": len(versions)}]
    for position, version in enumerate(versions):
        if version != spans[-1]["version"]:
            spans[-1]["end"] = position
            spans.append({"version": version, "start": position, "end": len(versions)})
    return spans

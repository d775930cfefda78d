"""The engine: one worker thread that steps the model over all requests, and the calls of other threads.

Invariant: model, cache and scheduler are touched by the worker only; every call is queued to it and runs
between two steps. The worker outlives any request. Knows nothing of HTTP.
"""

from __future__ import annotations

import concurrent.futures
import logging
import os
import secrets
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import TypeVar

import psutil
import torch
from torch import Tensor

from slime.config.sections import EngineConfig
from slime.errors import EngineError, EngineRequestError, EngineUnavailableError
from slime.serving.embedded.core import EngineStats, Listener, PauseMode
from slime.serving.embedded.kv_cache import KVShape
from slime.serving.embedded.model_loader import load_model
from slime.serving.embedded.request import Request, Update
from slime.serving.embedded.scheduler import Scheduler
from slime.serving.embedded.sequence import Sequence
from slime.serving.embedded.stepper import Stepper

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

MEMORY_SHARE = 0.25
"""Share of the free memory that the default capacity takes."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Engine:
    """Generation with a Hugging Face model on the CPU: continuous batching, prefix reuse, weight swaps."""

    takes_images = False

    def __init__(self, model_path: str, config: EngineConfig) -> None:
        """Load the model; `start` begins to serve.

        Raises:
            ModelError: the folder is unusable or the architecture unsupported.
        """
        # OpenMP threads of a second pool would outnumber the cores, and then each operation of either waits
        # for a wake-up instead of spinning: a third of the decode rate. So only the worker has a pool.
        torch.set_num_threads(1)
        loaded = load_model(model_path, DTYPES[config.dtype])
        self.model_path = model_path
        self.model_config = loaded.config
        self.tokenizer = loaded.tokenizer
        self.eos_ids = loaded.eos_ids
        self.vocab_size: int = loaded.runner.model.get_input_embeddings().num_embeddings
        capacity = config.max_total_tokens or _default_capacity(loaded.kv_shape)
        self.context_length = min(
            config.context_length or loaded.context_length, loaded.context_length, capacity
        )
        self._runner = loaded.runner
        self._scheduler = Scheduler(
            loaded.kv_shape,
            capacity=capacity,
            max_running=1 if config.enable_deterministic_inference else config.max_running_requests,
            chunk=config.chunked_prefill_size,
            context_length=self.context_length,
            vocab_size=self.vocab_size,
            reuses_prefixes=not config.enable_deterministic_inference,
        )
        self._stepper = Stepper(loaded.runner, self._scheduler)
        self._threads = config.num_threads or len(os.sched_getaffinity(0))
        self._paused = False
        self._released = False
        self._arrivals = 0
        self._rids: set[str] = set()
        self._calls: list[Callable[[], None]] = []
        self._wake = threading.Condition()
        self._stopping = False
        self._worker: threading.Thread | None = None

    @property
    def tells_routes(self) -> bool:
        """Whether the model has experts."""
        return self._runner.has_experts

    # --- life

    def start(self) -> None:
        """Start the worker thread."""
        self._worker = threading.Thread(target=self._work, name="slime-engine", daemon=True)
        self._worker.start()

    def shutdown(self) -> None:
        """Abort what is in flight and end the worker."""
        if self._worker is None:
            return
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._worker.join()

    @property
    def is_alive(self) -> bool:
        """Whether the worker runs."""
        return self._worker is not None and self._worker.is_alive()

    # --- requests

    def submit(self, request: Request, listener: Listener) -> None:
        """Queue a request. `listener` is called on the worker thread, the last time with a finish reason.

        Raises:
            EngineRequestError: a token outside the vocabulary, an empty or too long prompt, a name in use.
            EngineUnavailableError: the engine does not run.
        """
        self._check(request)
        with self._wake:
            self._require_worker()
            if request.rid in self._rids:
                raise EngineRequestError("a request of this name is in flight", place=f"rid {request.rid}")
            self._rids.add(request.rid)
            self._arrivals += 1
            sequence = self._new_sequence(request, listener, self._arrivals)
            self._calls.append(lambda: self._scheduler.add(sequence))
            self._wake.notify()

    def abort(self, rid: str) -> None:
        """End a request with what it has; an unknown name is fine."""
        self._post(lambda: self._stepper.abort(rid))

    def abort_all(self) -> None:
        """End all requests with what they have."""
        self._post(self._stepper.abort_all)

    def pause(self, mode: PauseMode) -> None:
        """Stop stepping; returns when the worker stands still. New requests wait for `resume`.

        `abort` ends the requests in flight, `in_place` keeps their keys and values, `retract` drops these,
        to be computed again after `resume`.
        """

        def pause() -> None:
            self._paused = True
            if mode == "abort":
                self._stepper.abort_all()
            elif mode == "retract":
                self._scheduler.retract_all()

        self._call(pause)

    def resume(self) -> None:
        """Undo `pause`."""

        def resume() -> None:
            self._paused = False

        self._call(resume)

    @property
    def is_paused(self) -> bool:
        """Whether `pause` is in force."""
        return self._paused

    # --- memory and weights

    def flush_cache(self) -> bool:
        """Forget all prefixes; False, and nothing done, while requests run or are paused in place."""

        def flush() -> bool:
            busy = bool(self._scheduler.live) or (self._scheduler.has_work and not self._paused)
            if not busy:
                self._scheduler.flush()
            return not busy

        return self._call(flush)

    def update_weights(
        self, named_tensors: Iterable[tuple[str, Tensor]], version: str, *, alias: bool, flush: bool
    ) -> None:
        """Swap all weights between two steps; requests in flight go on with the new ones.

        Args:
            alias: parameters become the given tensors themselves where the dtype agrees (no copy).
            flush: keys and values computed so far are not reused as prefixes any more.

        Raises:
            EngineError: names or shapes do not fit the model; nothing was changed.
        """
        weights = dict(named_tensors)

        def update() -> None:
            with torch.inference_mode(False), torch.no_grad():
                self._runner.replace_weights(weights, alias=alias)
            self._stepper.set_version(version, flush=flush)

        self._call(update)

    def set_weight_version(self, version: str) -> None:
        """Note that the owner of aliased tensors changed them in place; kept prefixes are forgotten."""
        self._call(lambda: self._stepper.set_version(version, flush=True))

    def release_memory(self) -> None:
        """Give key-value memory back until `resume_memory`; requests that come meanwhile wait.

        Raises:
            EngineError: requests run.
        """

        def release() -> None:
            if self._scheduler.live:
                raise EngineError(
                    "requests hold key-value memory", remedy="pause with abort or retract first"
                )
            self._scheduler.free_memory()
            self._released = True

        self._call(release)

    def resume_memory(self) -> None:
        """Undo `release_memory`."""

        def resume() -> None:
            self._released = False

        self._call(resume)

    @property
    def weight_version(self) -> str:
        """Version of the weights that the next token is sampled with."""
        return self._stepper.weight_version

    @property
    def stats(self) -> EngineStats:
        """What runs, what waits, what is held, and totals."""
        scheduler, counters = self._scheduler, self._scheduler.counters
        return EngineStats(
            running=len(scheduler.live),
            waiting=len(scheduler.waiting),
            used_tokens=scheduler.held_tokens,
            reusable_tokens=scheduler.store.tokens,
            capacity=scheduler.capacity,
            prefill_tokens=counters.prefill_tokens,
            cached_tokens=counters.cached_tokens,
            decode_tokens=counters.decode_tokens,
            steps=counters.steps,
            busy_seconds=self._stepper.busy_seconds,
        )

    # --- calls to the worker

    def _require_worker(self) -> None:
        if not self.is_alive or self._stopping:
            raise EngineUnavailableError("the engine does not run", remedy="call start() first")

    def _post(self, call: Callable[[], None]) -> None:
        with self._wake:
            self._require_worker()
            self._calls.append(call)
            self._wake.notify()

    def _call(self, function: Callable[[], Result]) -> Result:
        """Run `function` on the worker between two steps and give its result or error."""
        future: Future[Result] = Future()

        def run() -> None:
            try:
                future.set_result(function())
            except Exception as error:  # noqa: BLE001 - worker loop: the caller gets it
                future.set_exception(error)

        self._post(run)
        while not future.done():
            concurrent.futures.wait([future], timeout=1.0)
            if not (future.done() or self.is_alive):
                raise EngineUnavailableError("the engine's worker ended", remedy="see its log for the cause")
        return future.result()

    def _check(self, request: Request) -> None:
        ids, place = request.input_ids, f"rid {request.rid}"
        if not ids:
            raise EngineRequestError("the prompt is empty", place=place)
        if min(ids) < 0 or max(ids) >= self.vocab_size:
            wrong = next(i for i in ids if not 0 <= i < self.vocab_size)
            raise EngineRequestError(
                f"token id {wrong} is outside the vocabulary of {self.vocab_size}", place=place
            )
        if len(ids) + min(1, request.params.max_new_tokens) > self.context_length:
            raise EngineRequestError(
                f"the prompt has {len(ids)} tokens, the context is {self.context_length}", place=place
            )

    def _new_sequence(self, request: Request, listener: Listener, order: int) -> Sequence:
        def deliver(update: Update) -> None:
            if update.finish_reason is not None:
                self._rids.discard(request.rid)
            try:
                listener(update)
            except Exception:
                logger.exception("the listener of request %s failed", request.rid)

        seed = request.params.sampling_seed
        return Sequence(
            request,
            deliver,
            self.tokenizer,
            order=order,
            seed=secrets.randbits(64) if seed is None else seed,
            eos_ids=self.eos_ids,
            context_length=self.context_length,
        )

    # --- on the worker

    def _work(self) -> None:
        torch.set_num_threads(self._threads)
        with torch.inference_mode():
            try:
                while not self._stopping:
                    self._run_calls(wait=True)
                    if self._runnable:
                        self._stepper.step()
            finally:
                with self._wake:
                    self._stopping = True
                self._run_calls(wait=False)
                self._stepper.abort_all()

    def _run_calls(self, *, wait: bool) -> None:
        """Run what was queued; with `wait`, sleep until there is a call, a step to do or an end."""
        with self._wake:
            while wait and not (self._calls or self._runnable or self._stopping):
                self._wake.wait()
            calls, self._calls = self._calls, []
        for call in calls:
            try:
                call()
            except Exception:
                logger.exception("a call to the engine failed")

    @property
    def _runnable(self) -> bool:
        return self._scheduler.has_work and not (self._paused or self._released)


def _default_capacity(shape: KVShape) -> int:
    """Key-value tokens that fit into a share of the memory that is free now."""
    return max(16, int(psutil.virtual_memory().available * MEMORY_SHARE) // shape.bytes_per_token)

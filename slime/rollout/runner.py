"""Runs one rollout: generate hook under its deadline, sample hooks, reward; and the rollouts of a group.

Invariant: whatever user code does, one call gives one `Rollout`; what went wrong becomes its outcome with a
reason, never a reward (law 4). Only configuration errors and cancellation by the owner pass through.
Knows nothing of batches, filters or data sources.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any

from slime.config.weight_movement import frozen_urls, request_fields
from slime.errors import ConfigError
from slime.rollout.boundary import check_trainable, checked_siblings, vocabulary_size
from slime.rollout.events import NO_LOG, EventLog
from slime.rollout.group_run import copy_of
from slime.rollout.hooks import call_generate, load_hook
from slime.rollout.inflight import IN_FLIGHT, Entry, InFlight
from slime.rollout.outcome import INTERRUPTED, Failed, Member, Outcome, Rollout, Timings, outcome_of
from slime.rollout.rewarding import Rewarder
from slime.rollout.rm_hub.verdict import failure_kind
from slime.rollout.sample_hooks import apply_rollout_sample_hooks
from slime.rollout.seeds import CallSeeds, call_seeds
from slime.rollout.stopping import GroupStop, Stop
from slime.rollout.tasks import GRACE_SECONDS, all_of, bounded, rollout_seconds
from slime.utils.request_scope import RequestScope, entered
from slime.utils.types import Sample

logger = logging.getLogger(__name__)
DEFAULT_GENERATE = "slime.rollout.sglang_rollout.generate"
Generate = Callable[[Any, Sample, dict[str, Any]], Awaitable[Sample]]
_DONE = (Sample.Status.COMPLETED, Sample.Status.TRUNCATED)
_PAST_DEADLINE = ("timeout", "DeadlineError", "TimeoutError")
"""Kinds of failure that are told at once: other failures are told by kind, when their group is judged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """What the rollouts of one step or evaluation have in common.

    Attributes:
        step: number of the rollout step, for sample hooks; None outside of one.
        sampling_params: each rollout gets a copy of its own.
        seed: base of the sampling seeds, or None to leave them to the engine.
    """

    step: int | None
    sampling_params: dict[str, Any]
    evaluation: bool = False
    seed: int | None = None

    def seeds(self, sample: Sample, attempt: int = 0) -> CallSeeds | None:
        """The seeds of the engine calls of one try of a rollout; a repeat has the same."""
        if self.seed is None or sample.index is None:
            return None
        return CallSeeds(self.seed, sample.index, attempt)


class RolloutRunner:
    """Runs rollouts for one configuration.

    Args:
        args: what hooks get; reads custom_generate_function_path, rollout_sample_hook_path,
            rollout_timeout, turn_timeout, rollout_retries, mask_offpolicy_in_partial_rollout, hf_checkpoint
            (for the size of the vocabulary).
        generate: the default generation, where no hook is set.
        slots: bounds the rollouts that generate at once; rewards are outside of it.
        gives_up: asked when a rollout gets its slot; True ends it as ABORTED.
        grace: seconds that cancelled user code may take to end.
        counts: gets how many rollouts began again after an error, ``retried/<reason>``, and how many were
            ended by a cut of their group, ``cut``, whatever became of them.
    """

    def __init__(
        self,
        args: Any,
        *,
        generate: Generate,
        slots: asyncio.Semaphore,
        gives_up: Callable[[], bool] = lambda: False,
        inflight: InFlight = IN_FLIGHT,
        grace: float = GRACE_SECONDS,
        log: EventLog = NO_LOG,
        counts: Counter[str] | None = None,
    ) -> None:
        self._args = args
        self._generate = generate
        self._slots = slots
        self._gives_up = gives_up
        self._inflight = inflight
        self._grace = grace
        self._timeout = rollout_seconds(args)
        self._vocab_size = vocabulary_size(getattr(args, "hf_checkpoint", None))
        self._turn_timeout: float | None = getattr(args, "turn_timeout", None)
        self._request_fields, self._frozen = request_fields(args), frozen_urls(args)
        self._retries = int(getattr(args, "rollout_retries", None) or 0)
        self._masks_kept = bool(getattr(args, "mask_offpolicy_in_partial_rollout", False))
        self._rewarder = Rewarder(args, grace)
        self._log = log
        self._counts: Counter[str] = Counter() if counts is None else counts

    async def run_group(
        self, group: Sequence[Member], call: Call, stop: GroupStop | None = None
    ) -> list[Rollout]:
        """All rollouts of a prompt, at once; then the group reward, where it is one call.

        Args:
            stop: ends the rollouts early.

        Raises:
            ConfigError: the run is not configured for these samples.
        """
        stop = stop or GroupStop()
        rollouts = await all_of(self._tried(member, call, stop) for member in group)
        if self._rewarder.by_group and stop.reason is not Stop.CONTINUE:
            return await self._reward_group(rollouts, call.evaluation)
        return rollouts

    async def _tried(self, member: Member, call: Call, stop: GroupStop) -> Rollout:
        """One rollout, from the start again after an error as long as tries are left."""
        for attempt in range(self._retries + 1):
            last = attempt == self._retries
            rollout = await self.run(member if last else copy_of(member), call, stop, attempt)
            if last or stop.reason is not None or not isinstance(rollout.outcome, Failed):
                break
            self._counts[f"retried/{rollout.outcome.reason}"] += 1
            logger.warning(
                "rollout %s begins again (try %d of %d) after %s: %s",
                rollout.rollout_id,
                attempt + 2,
                self._retries + 1,
                rollout.outcome.reason,
                rollout.outcome.detail,
            )
        return rollout

    async def run(
        self, member: Member, call: Call, stop: GroupStop | None = None, attempt: int = 0
    ) -> Rollout:
        """One rollout. A member that is finished already is rewarded if needed, and not generated again.

        Args:
            attempt: how often it was tried before; each try samples by seeds of its own.
        """
        siblings = list(member) if isinstance(member, list) else [member]
        base = siblings[0]
        base.rollout_id = base.index if base.rollout_id is None else base.rollout_id
        name = f"rollout {base.rollout_id} (group {base.group_index})"
        stop = stop or GroupStop()
        fields, frozen = self._request_fields, self._frozen
        scope = stop.hold(RequestScope(timeout=self._turn_timeout, fields=fields, frozen=frozen))
        scope.on_call = lambda ended: self._log.call(base, ended)
        with self._inflight.track(name, "queued", scope=scope) as entry:
            run = _Run(
                siblings, isinstance(member, list), call, entry, self._vocab_size, stop, scope, attempt
            )
            try:
                if not all(sample.status in _DONE for sample in siblings):
                    try:
                        with entered(scope):
                            await self._make_samples(run)
                    finally:
                        self._counts["cut"] += run.is_cut
                await self._reward(run)
            except ConfigError:
                raise
            except Exception as error:  # noqa: BLE001 - boundary: a rollout task
                failed = run.failure(error)
                _tell_past_deadline(name, failed, error)
                return run.failed(failed, error)
        return run.finished()

    async def _make_samples(self, run: _Run) -> None:
        queued = time.perf_counter()
        async with self._slots:
            run.queued = time.perf_counter() - queued
            if self._gives_up() or run.scope.stopped:
                run.base.status = Sample.Status.ABORTED
                run.scope.interrupted |= run.scope.stopped
                return
            run.take_up(self._masks_kept)
            await self._run_generate(run)
        run.note_stop()
        paths = getattr(self._args, "rollout_sample_hook_path", None)
        if paths:
            run.enter("sample hooks", paths if isinstance(paths, str) else ", ".join(paths), self._timeout)
            await self._run_sample_hooks(run)

    async def _run_generate(self, run: _Run) -> None:
        base, call = run.base, run.call
        path = base.generate_function_path or getattr(self._args, "custom_generate_function_path", None)
        run.enter("generate", path or DEFAULT_GENERATE, self._timeout)
        hook = load_hook(path, "custom_generate_function_path") if path else self._generate
        base.session_id = base.session_id or uuid.uuid4().hex
        started = time.perf_counter()
        work = call_generate(hook, self._args, base, dict(call.sampling_params), call.evaluation)
        with call_seeds(call.seeds(base, run.attempt)):
            result = await self._bounded(run, work)
        run.generate = time.perf_counter() - started
        run.fan_out = isinstance(result, list)
        run.take(checked_siblings(result, base, run.place))

    async def _run_sample_hooks(self, run: _Run) -> None:
        hooked = apply_rollout_sample_hooks(
            self._args, run.samples, rollout_id=run.call.step, evaluation=run.call.evaluation
        )
        run.take(checked_siblings(await self._bounded(run, hooked), run.base, run.place))

    async def _reward(self, run: _Run) -> None:
        """Reward what is worth one, unless the whole group is rewarded in one call later."""
        if self._rewarder.by_group or not run.worth_reward():
            return
        run.enter("reward", self._rewarder.place(run.samples), self._rewarder.seconds(run.samples))
        started = time.perf_counter()
        await self._rewarder.reward(run.samples, run.call.evaluation)
        run.reward = time.perf_counter() - started
        self._log.reward(run.base, run.samples, run.reward)

    async def _reward_group(self, rollouts: list[Rollout], evaluation: bool) -> list[Rollout]:
        """Reward the valid rollouts of a group in one call; if it breaks, all of them fail."""
        samples = [sample for rollout in rollouts if rollout.valid for sample in rollout.samples]
        group = f"group {rollouts[0].group_index}"
        try:
            with self._inflight.track(group, "group reward", self._rewarder.seconds(samples)):
                await self._rewarder.reward_together(samples, group, evaluation)
        except ConfigError:
            raise
        except Exception as error:  # noqa: BLE001 - boundary: the reward of a group of rollouts
            failed = _failure("reward", self._rewarder.place(samples), error)
            _tell_past_deadline(group, failed, error)
            return [rollout.as_failed(failed, error) if rollout.valid else rollout for rollout in rollouts]
        return rollouts

    async def _bounded(self, run: _Run, work: Coroutine[Any, Any, Any]) -> Any:
        return await bounded(
            work,
            seconds=self._timeout,
            what=f"{run.phase} ({run.place})",
            place=f"rollout {run.base.rollout_id}",
            grace=self._grace,
        )


class _Run:
    """One rollout while it runs: where it stands, for its result and its messages."""

    def __init__(
        self,
        samples: list[Sample],
        fan_out: bool,
        call: Call,
        entry: Entry,
        vocab_size: int | None,
        stop: GroupStop,
        scope: RequestScope,
        attempt: int,
    ) -> None:
        self.base = samples[0]
        self.samples = samples
        self.fan_out = fan_out
        self.call = call
        self.phase = self.place = "queued"
        self.queued = self.generate = self.reward = 0.0
        self.vocab_size = vocab_size
        self.scope = scope
        self.attempt = attempt
        self._stop = stop
        self._entry = entry

    @property
    def is_cut(self) -> bool:
        """Whether a cut of its group ended it: an engine call of it, or before its first."""
        return self._stop.reason is Stop.CUT and self.scope.interrupted

    def take_up(self, masks_kept: bool) -> None:
        """Begin, or go on from the tokens of an earlier step."""
        base = self.base
        base.status = Sample.Status.PENDING
        if base.response_length and masks_kept:
            base.loss_mask = [0] * base.response_length

    def note_stop(self) -> None:
        """Let what a cut ended count as truncated, as far as it has tokens to train; note where began what
        will be continued. What the hook gave up by itself stays given up.

        Raises:
            HookError: what would train cannot.
        """
        if self.scope.interrupted and self.worth_reward():
            self._note_interruption()
        aborted = [sample for sample in self.samples if sample.status is Sample.Status.ABORTED]
        if self._stop.reason is Stop.CONTINUE:
            for sample in aborted:
                if sample.response_length:
                    sample.metadata.setdefault("start_rollout_id", self.call.step)
        elif self.is_cut and not _given_up(aborted):
            for sample in aborted:
                if sample.effective_response_length:
                    sample.status = Sample.Status.TRUNCATED
                    sample.metadata["cut"] = "held up a batch"
            self.take(self.samples)

    def _note_interruption(self) -> None:
        """A hook that went on behind a refused engine call thinks that it is done. What it has is no place to
        go on from, so where it would be continued it begins again."""
        for sample in self.samples:
            sample.status = Sample.Status.ABORTED
            sample.metadata["abort_reason"] = INTERRUPTED

    def enter(self, phase: str, place: str, seconds: float) -> None:
        """Go on to a phase, in code at `place`, that should end within `seconds`."""
        self.phase, self.place = phase, place
        self._entry.enter(f"{phase} in {place}", seconds)

    def take(self, samples: list[Sample]) -> None:
        """Hold what user code returned, checked where it can come to training."""
        self.samples = samples
        if self.worth_reward() and not self.call.evaluation:
            for sample in samples:
                check_trainable(sample, self.place, vocab_size=self.vocab_size)

    def worth_reward(self) -> bool:
        """False for a rollout that user code or the engine gave up."""
        return not any(s.status in (Sample.Status.ABORTED, Sample.Status.FAILED) for s in self.samples)

    def finished(self) -> Rollout:
        """The result by the statuses of the samples."""
        return self._result(outcome_of(self.samples, self.place), None)

    def failure(self, error: Exception) -> Failed:
        """What `error` says of it, and past a deadline what happened last."""
        failed = _failure(self.phase, self.place, error)
        if failure_kind(error) not in _PAST_DEADLINE:
            return failed
        return replace(failed, detail=f"{failed.detail}\n  last event: {self._entry.last_event}")

    def failed(self, failed: Failed, error: Exception) -> Rollout:
        """The result when `error` ended it."""
        return self._result(failed, error)

    def _result(self, outcome: Outcome, error: Exception | None) -> Rollout:
        rollout = Rollout(
            group_index=self.base.group_index,
            rollout_id=self.base.rollout_id,
            samples=tuple(self.samples),
            fan_out=self.fan_out,
            outcome=outcome,
            timings=Timings(self.queued, self.generate, self.reward),
            error=error,
        )
        rollout.void_unless_valid()
        return rollout


def _given_up(aborted: Sequence[Sample]) -> bool:
    """Whether the hook says why it aborted."""
    return any(sample.metadata.get("abort_reason") not in (None, INTERRUPTED) for sample in aborted)


def _failure(phase: str, place: str, error: Exception) -> Failed:
    """Reason by phase and kind of error: few values, to count by. The hub wraps what hooks raise."""
    return Failed(f"{phase}: {failure_kind(error)}", place, str(error))


def _tell_past_deadline(name: str, failed: Failed, error: Exception) -> None:
    """Law 6: what passed its deadline is reported now, however long its group still runs."""
    if failure_kind(error) in _PAST_DEADLINE:
        logger.warning("%s is past its deadline: %s", name, failed.detail)

"""Contracts of a generate hook on an engine that aborts, fails, is silent, or while it is cancelled itself.

A failure is never a reward (law 4): in each case the hook raises, or returns ABORTED or FAILED. Every wait
ends: with the engine's abort, with a cancellation, at the deadline (law 6).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from slime.contracts.attempt import Attempt, attempt
from slime.contracts.finding import NotApplicableError, broken
from slime.contracts.generate_case import GenerateCase
from slime.contracts.stage import Stage
from slime.errors import DeadlineError
from slime.rollout.boundary import check_trainable
from slime.serving.scripted import Policy, ScriptedAnswer, ScriptedCall

SILENCE_SECONDS = 1.0
"""The hook's deadline before an engine that never answers."""
OVERLOADS = 2
_LONG = "and so on " * 100
_RAISE = "let the error pass, or set sample.status = Sample.Status.ABORTED (FAILED) and return the sample"


def ends_when_the_engine_aborts(case: GenerateCase) -> str:
    """When the engine aborts its requests (a step is full, weights change), it returns ABORTED or raises;
    what was sampled until then stays consistent."""
    _ = case.rollout
    stage = case.stage
    with stage.playing(lambda call: ScriptedAnswer(text=_LONG, token_latency=0.02)):
        one = attempt(stage, case.hook, stage.samples(1)[0], disturb=_aborting(stage))
    _ends(one, "an abort of the engine")
    for sample in one.samples:
        check_trainable(sample, case.path, vocab_size=len(stage.tokenizer))
    foreign = case.strangers([one])
    if foreign:
        raise broken(
            "sampled tokens only", f"{len(foreign)} trained tokens that the engine did not send", _RAISE
        )
    return _how(one)


def ends_when_it_is_cancelled(case: GenerateCase) -> None:
    """A cancellation passes through it: it ends within the grace, by CancelledError, and leaves neither a
    task nor a request at the engine."""
    _ = case.rollout
    stage = case.stage
    with stage.playing(_silent):
        one = attempt(stage, case.hook, stage.samples(1)[0], disturb=_cancelling(stage, len(stage.served)))
        if not one.served:
            raise NotApplicableError("it was cancelled before its first request")
        _check_cancelled(stage, one)


def ends_before_a_silent_engine(case: GenerateCase) -> str:
    """When the engine never answers, it is over at the deadline (args.rollout_timeout), and not as a
    success."""
    _ = case.rollout
    with case.stage.playing(_silent):
        one = attempt(case.stage, case.hook, case.stage.samples(1)[0], seconds=SILENCE_SECONDS)
        _ends(one, "silence of the engine")
        _check_left(case.stage, one)
    return _how(one)


def fails_with_the_engine(case: GenerateCase) -> str:
    """When the engine answers 500, it raises or returns FAILED or ABORTED: no made-up reward."""
    return _under(case, lambda call: ScriptedAnswer(error=(500, "the engine is broken")), "status 500")


def fails_with_a_later_turn(case: GenerateCase) -> str:
    """When a later turn fails, the rollout fails: half an attempt is not judged as a whole one."""
    if len(case.rollout.served) < 2:
        raise NotApplicableError("it asks the engine once")
    first = len(case.stage.served)

    def answer(call: ScriptedCall) -> ScriptedAnswer:
        good = len(case.stage.served) == first
        return case.stage.answers(call) if good else ScriptedAnswer(error=(500, "the engine is broken"))

    return _under(case, answer, "status 500 in a later turn")


def outlives_an_overload(case: GenerateCase) -> str:
    """When the engine answers 429 for a while, it waits and goes on by the same laws, or gives up openly."""
    _ = case.rollout
    stage, first = case.stage, len(case.stage.served)

    def answer(call: ScriptedCall) -> ScriptedAnswer:
        overloaded = len(stage.served) < first + OVERLOADS
        return ScriptedAnswer(error=(429, "too many requests")) if overloaded else stage.answers(call)

    with stage.playing(answer):
        one = attempt(stage, case.hook, stage.samples(1)[0])
    if one.gave_up:
        _ends(one, "status 429")
        return _how(one)
    bad = case.strangers([one])
    if bad or not any(call.token_ids for call in one.served):
        raise broken("a rollout of sampled tokens, or none", f"{len(bad)} others that train", _RAISE)
    return "went on"


CONTRACTS: tuple[Callable[[GenerateCase], str | None], ...] = (
    ends_when_the_engine_aborts,
    ends_when_it_is_cancelled,
    ends_before_a_silent_engine,
    fails_with_the_engine,
    fails_with_a_later_turn,
    outlives_an_overload,
)


def _silent(call: ScriptedCall) -> ScriptedAnswer:
    return ScriptedAnswer(hang=True)


def _under(case: GenerateCase, policy: Policy, what: str) -> str:
    _ = case.rollout
    with case.stage.playing(policy):
        one = attempt(case.stage, case.hook, case.stage.samples(1)[0])
    _ends(one, what)
    return _how(one)


def _ends(one: Attempt, what: str) -> None:
    """It ended, and not as if nothing had happened."""
    if not one.ended:
        raise broken(f"an end after {what}", "that it goes on after its cancellation", _RAISE)
    if one.returned and not one.gave_up:
        rewards = [sample.reward for sample in one.samples if sample.reward is not None]
        reward = f" and reward {rewards[0]}" if rewards else ""
        status = ", ".join(sorted(status.name for status in one.statuses))
        raise broken(f"an exception, ABORTED or FAILED after {what}", f"status {status}{reward}", _RAISE)


def _how(one: Attempt) -> str:
    if one.returned:
        return "returned " + ", ".join(sorted(status.name for status in one.statuses))
    late = isinstance(one.error, DeadlineError) and one.ended
    return "ended at the deadline" if late else f"raised {type(one.error).__name__}"


def _aborting(stage: Stage) -> Any:
    first = len(stage.served)

    async def abort(task: asyncio.Task[Any]) -> None:
        while len(stage.served) == first:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        while True:  # as at the end of a step, where later requests are not wanted either
            stage.server.engine.abort_all()
            await asyncio.sleep(0.02)

    return abort


def _cancelling(stage: Stage, first: int) -> Any:
    async def cancel(task: asyncio.Task[Any]) -> None:
        while len(stage.served) == first:
            await asyncio.sleep(0.01)
        task.cancel()

    return cancel


def _check_cancelled(stage: Stage, one: Attempt) -> None:
    if not one.ended:
        raise broken(
            "an end within the grace of a cancellation",
            "that it goes on",
            "do not catch CancelledError, or raise it again once it is clean",
        )
    if one.returned:
        raise broken(
            "CancelledError",
            "that it swallowed the cancellation and returned",
            "clean up in `finally`, or raise CancelledError again",
        )
    _check_left(stage, one)


def _check_left(stage: Stage, one: Attempt) -> None:
    if one.still_running:
        stage.server.engine.abort_all()
        raise broken(
            "no request at the engine any more",
            f"{one.still_running} that go on",
            "let slime's engine client ask, or abort the request by its rid (/abort_request) in `finally`",
        )
    if one.leaked:
        raise broken(
            "no task left", ", ".join(one.leaked), "cancel and await in `finally` the tasks it starts"
        )

"""One call of a generate hook on the stage, watched: what it gave, how it ended, and what it left behind.

Invariant: an attempt ends within its deadline and the grace of a cancellation, whatever the hook does; only
code that blocks the event loop can hold it, which the stage reports. Judges nothing.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from slime.contracts.stage import Stage
from slime.contracts.trace import Served
from slime.rollout.hooks import Hook, call_generate
from slime.rollout.tasks import GRACE_SECONDS, bounded
from slime.utils.types import Sample, SampleStatus

SETTLE_SECONDS = 2.0
"""How long requests and tasks may take to be gone after the hook has ended."""
Disturb = Callable[[asyncio.Task[Any]], Awaitable[None]]
"""Does something to an attempt while it runs."""


@dataclass(eq=False, kw_only=True)
class Attempt:
    """What came of one call.

    Attributes:
        given: the sample that the hook got, as it was before.
        base: the sample that the hook got.
        result: what it returned.
        error: what it raised, or the deadline that ended it.
        returned, ended: whether it returned; whether it ended at all once it was cancelled.
        params_before, params: sampling parameters before and after.
        served: the engine's requests in the meantime.
        leaked: tasks that were not there before and go on.
        still_running: requests at the engine after it.
    """

    given: Sample
    base: Sample
    params: dict[str, Any]
    params_before: dict[str, Any]
    result: Any = None
    error: BaseException | None = None
    returned: bool = False
    ended: bool = False
    served: list[Served] = field(default_factory=list)
    leaked: list[str] = field(default_factory=list)
    still_running: int = 0

    @property
    def samples(self) -> list[Sample]:
        """What it returned, as a list."""
        result = self.result if isinstance(self.result, list) else [self.result]
        return [item for item in result if isinstance(item, Sample)]

    @property
    def statuses(self) -> set[SampleStatus]:
        """Of all samples."""
        return {sample.status for sample in self.samples}

    @property
    def gave_up(self) -> bool:
        """Whether it ended without a rollout that could train."""
        return not self.returned or bool(self.statuses & {Sample.Status.ABORTED, Sample.Status.FAILED})


def attempt(
    stage: Stage,
    hook: Hook,
    sample: Sample,
    *,
    params: dict[str, Any] | None = None,
    evaluation: bool = False,
    seconds: float | None = None,
    disturb: Disturb | None = None,
) -> Attempt:
    """Call the hook once.

    Args:
        seconds: deadline of the call, by default the stage's; the hook sees it as ``args.rollout_timeout``.
        disturb: runs beside the call.

    Raises:
        ContractError: the hook blocks the event loop.
    """
    return attempts(
        stage, hook, [sample], params=params, evaluation=evaluation, seconds=seconds, disturb=disturb
    )[0]


def attempts(
    stage: Stage,
    hook: Hook,
    samples: list[Sample],
    *,
    params: dict[str, Any] | None = None,
    evaluation: bool = False,
    seconds: float | None = None,
    disturb: Disturb | None = None,
) -> list[Attempt]:
    """Call the hook for all samples at once."""
    limit = seconds or stage.seconds
    args = stage.args if seconds is None else stage.args.with_values(rollout_timeout=seconds)
    tries = [_prepared(sample, params or stage.sampling_params) for sample in samples]
    first = len(stage.served)

    async def run() -> None:
        before = asyncio.all_tasks()
        works = [asyncio.create_task(_call(hook, args, one, evaluation, limit)) for one in tries]
        beside = None if disturb is None else asyncio.create_task(_beside(disturb, works[0]))
        await asyncio.wait(works)
        if beside is not None:
            beside.cancel()
            await asyncio.wait({beside})
        leaked = await _settled(stage, before)
        for one in tries:
            one.leaked, one.still_running = leaked, stage.busy

    stage.run(run(), limit + SETTLE_SECONDS)
    for one in tries:
        one.served = stage.served[first:]
    return tries


def _prepared(sample: Sample, params: dict[str, Any]) -> Attempt:
    return Attempt(
        given=copy.deepcopy(sample), base=sample, params=copy.deepcopy(params), params_before=params
    )


async def _call(hook: Hook, args: Any, one: Attempt, evaluation: bool, seconds: float) -> None:
    async def watched() -> None:
        try:
            one.result = await call_generate(hook, args, one.base, one.params, evaluation)
            one.returned = True
        except BaseException as error:
            one.error = error
            raise
        finally:
            one.ended = True

    place = f"sample {one.given.index}"
    try:
        await bounded(watched(), seconds=seconds, what="the hook", place=place, grace=GRACE_SECONDS)
    except Exception as error:  # noqa: BLE001 - boundary: a rollout task
        one.error = error


async def _beside(disturb: Disturb, task: asyncio.Task[Any]) -> None:
    await disturb(task)


async def _settled(stage: Stage, before: set[asyncio.Task[Any]]) -> list[str]:
    """Wait until nothing is left, at most `SETTLE_SECONDS`; what is left."""
    own, end = asyncio.current_task(), asyncio.get_running_loop().time() + SETTLE_SECONDS
    while True:
        left = [task for task in asyncio.all_tasks() - before if task is not own and not task.done()]
        if not (left or stage.busy) or asyncio.get_running_loop().time() > end:
            return sorted(_name(task) for task in left)
        await asyncio.sleep(0.02)


def _name(task: asyncio.Task[Any]) -> str:
    coroutine = task.get_coro()
    return getattr(coroutine, "__qualname__", None) or repr(coroutine)

"""A run of the scheduler in virtual time: the real scheduler and policies, with rollouts that only take time.

What a rollout takes is given; an engine's slots bound how many run at once; training and updates take a
fixed time each. Invariant: every decision is the scheduler's own. Not modelled: that an engine is slower with
more in flight, and the pause of an update.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from slime.rollout.accounting import Account, Fate
from slime.rollout.collector import Judge
from slime.rollout.events import EventLog
from slime.rollout.inflight import InFlight
from slime.rollout.outcome import (
    Aborted,
    Completed,
    Member,
    MemberGroup,
    Outcome,
    Rollout,
    Timings,
    Truncated,
)
from slime.rollout.policy import Policy
from slime.rollout.scheduler import Scheduler
from slime.rollout.scheduling import Batch, Finish, Limits, keep_all
from slime.rollout.stopping import GroupStop, Stop
from slime.rollout.virtual_time import run_virtually
from slime.utils.request_scope import RequestScope, entered
from slime.utils.types import Sample

TOKENS_PER_SECOND = 20
"""Only ratios of lengths come out."""
Draw = Callable[[], float]
"""The next rollout's duration in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What is simulated.

    Attributes:
        policy: how rollouts and training overlap.
        ahead: whether the next step is collected while one trains.
        slots: rollouts that run at once.
        draw: durations, in the order in which rollouts start.
        train_seconds, update_seconds: of each step.
        steps: how many.
        judge, finish: the filter, and hooks of a full batch, as a scheduler has them.
    """

    policy: Policy
    limits: Limits
    slots: int
    draw: Draw
    steps: int
    ahead: bool = False
    train_seconds: float = 0.0
    update_seconds: float = 0.0
    judge: Judge = keep_all
    finish: Finish | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcomes:
    """What came of it.

    Attributes:
        seconds: of the whole.
        ages: of the oldest token of each trained group, in updates.
        idle: share of the time in which the trainer waited for rollouts.
        cut: rollouts that were cut because they held up a batch.
        groups: trained in each step, by group index.
    """

    seconds: float
    account: Account
    ages: list[int]
    idle: float
    cut: int
    groups: list[list[int]] = field(default_factory=list)

    @property
    def trained_per_second(self) -> float:
        """Rollouts trained a second."""
        return self.account.total(Fate.TRAINED) / self.seconds

    @property
    def oldest(self) -> int:
        """The oldest token that trained, in updates."""
        return max(self.ages)

    @property
    def mean_age(self) -> float:
        """Mean over groups of their oldest token's age."""
        return statistics.fmean(self.ages)


def simulate(setting: Setting, log: Path | None = None) -> Outcomes:
    """Play a setting to its end.

    Args:
        log: where to write the events, as a run does.

    Raises:
        SlimeError: as `Scheduler.collect`, or where everything waits for something else.
    """
    return run_virtually(_Play(setting, log).run())


class _Play:
    def __init__(self, setting: Setting, log: Path | None) -> None:
        self._setting = setting
        self._log_path = log
        self._ids = 0
        self._back: list[MemberGroup] = []
        self._ages: list[int] = []
        self._groups: list[list[int]] = []
        self._cut = 0
        self._version = 0

    async def run(self) -> Outcomes:
        setting, loop = self._setting, asyncio.get_running_loop()
        self._slots = asyncio.Semaphore(setting.slots)
        idle = 0.0
        scheduler = Scheduler(
            source=self,
            run_group=self._run_group,
            policy=setting.policy,
            limits=setting.limits,
            judge=setting.judge,
            finish=setting.finish,
            inflight=InFlight(clock=loop.time),
            log=EventLog(self._log_path, clock=loop.time),
        )
        async with scheduler:
            collecting = asyncio.create_task(scheduler.collect(0))
            for step in range(setting.steps):
                started = loop.time()
                batch = await collecting
                idle += loop.time() - started
                self._take(batch)
                later = step + 1 < setting.steps
                if setting.ahead and later:
                    collecting = asyncio.create_task(scheduler.collect(step + 1))
                await asyncio.sleep(setting.train_seconds)
                if setting.ahead and later and not setting.policy.continuous:
                    started = loop.time()
                    await asyncio.wait({collecting})
                    idle += loop.time() - started
                await scheduler.before_update()
                await asyncio.sleep(setting.update_seconds)
                self._version = step + 1
                scheduler.weights_changed(step + 1)
                if not setting.ahead and later:
                    collecting = asyncio.create_task(scheduler.collect(step + 1))
            seconds = loop.time()
        total = scheduler.ledger.total
        return Outcomes(
            seconds=seconds,
            account=total,
            ages=self._ages,
            idle=idle / seconds,
            cut=self._cut,
            groups=self._groups,
        )

    def _take(self, batch: Batch) -> None:
        self._ages += [batch.step - run.oldest_version for run in batch.groups]
        self._groups.append([run.key[0] for run in batch.groups])
        self._cut += sum(isinstance(r.outcome, Truncated) for run in batch.groups for r in run.rollouts)

    def get_samples(self, num_samples: int, /) -> Sequence[Sequence[Member]]:
        """What came back, then new groups."""
        taken, self._back = self._back[:num_samples], self._back[num_samples:]
        return [*taken, *(self._new() for _ in range(num_samples - len(taken)))]

    def add_samples(self, groups: list[MemberGroup], /) -> None:
        """Take groups back."""
        self._back += groups

    def _new(self) -> MemberGroup:
        size = self._setting.limits.group_size
        group = self._ids // size
        self._ids += size
        return [
            Sample(
                group_index=group, index=index, rollout_id=index, metadata={"seconds": self._setting.draw()}
            )
            for index in range(self._ids - size, self._ids)
        ]

    async def _run_group(self, group: MemberGroup, step: int, stop: GroupStop) -> list[Rollout]:
        return list(await asyncio.gather(*(self._run(member, stop) for member in group)))

    async def _run(self, member: Member, stop: GroupStop) -> Rollout:
        sample = member[0] if isinstance(member, list) else member
        scope, loop = stop.hold(RequestScope()), asyncio.get_running_loop()
        if sample.status is Sample.Status.COMPLETED:
            return _rollout(sample, Completed(), 0.0)
        async with self._slots:
            started, version = loop.time(), self._version
            with entered(scope):
                done = not scope.stopped and await self._sleep(sample, scope)
        seconds = loop.time() - started
        sample.metadata["seconds"] = max(sample.metadata["seconds"] - seconds, 0.0)
        tokens = max(round(TOKENS_PER_SECOND * seconds), 1)
        sample.append_response_tokens(
            tokens=[0] * tokens,
            log_probs=[0.0] * tokens,
            meta_info={"finish_reason": "stop" if done else "abort", "weight_version": str(version)},
        )
        cut: Outcome = Truncated() if stop.reason is Stop.CUT else Aborted("stopped")
        return _rollout(sample, Completed() if done else cut, seconds)

    async def _sleep(self, sample: Sample, scope: RequestScope) -> bool:
        """Whether the rollout came to its end before it was stopped."""
        stopped = asyncio.Event()

        async def abort(rid: str) -> None:
            stopped.set()

        with scope.holding(str(sample.index), abort, 0):
            waiting = asyncio.create_task(stopped.wait())
            try:
                await asyncio.wait({waiting}, timeout=sample.metadata["seconds"])
            finally:
                waiting.cancel()
        return not stopped.is_set()


def _rollout(sample: Sample, outcome: Outcome, seconds: float) -> Rollout:
    return Rollout(
        group_index=sample.group_index,
        rollout_id=sample.rollout_id,
        samples=(sample,),
        fan_out=False,
        outcome=outcome,
        timings=Timings(generate=seconds),
    )

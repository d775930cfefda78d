"""The scheduler's decisions again, from the event log of a run.

The real scheduler gets the recorded groups at the recorded times, in virtual time, and closes its batches
anew. Invariant: nothing of the recorded decisions is used but what came from outside of the scheduler:
durations, outcomes, the verdicts of filters and when they came, when the hooks of a full batch ended, and
when steps and weights came. Knows no engine and no data.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from slime.errors import DataError, SlimeError
from slime.rollout.group_run import GroupRun
from slime.rollout.inflight import InFlight
from slime.rollout.outcome import Aborted, Completed, Failed, Member, MemberGroup, Outcome, Rollout, Truncated
from slime.rollout.policy import FullyAsynchronous, Policy, Synchronous
from slime.rollout.scheduler import Scheduler
from slime.rollout.scheduling import Limits
from slime.rollout.stopping import GroupStop
from slime.rollout.virtual_time import run_virtually
from slime.utils.types import Sample

_POLICIES: dict[str, type[Synchronous] | type[FullyAsynchronous]] = {
    "Synchronous": Synchronous,
    "FullyAsynchronous": FullyAsynchronous,
}
RESOLUTION = 1e-6
"""Seconds that the log tells apart."""


@dataclass(frozen=True, slots=True)
class Closed:
    """The groups of one step, as recorded and as decided again."""

    step: int
    recorded: list[int]
    replayed: list[int]

    @property
    def same(self) -> bool:
        """Whether they agree."""
        return self.recorded == self.replayed


def replay(events: Iterable[dict[str, Any]]) -> list[Closed]:
    """Decide every recorded batch again; of a run that was resumed, each part by itself.

    Raises:
        DataError: the log holds no scheduler, or one that is not known here.
    """
    parts: list[list[dict[str, Any]]] = []
    for event in events:
        if event["event"] == "scheduler":
            parts.append([])
        if parts:
            parts[-1].append(event)
    if not parts:
        raise DataError("the log holds no scheduler: nothing was decided in it", place="events")
    return [closed for part in parts for closed in run_virtually(_Part(part).run())]


@dataclass(slots=True)
class _Submission:
    """One start of a group, and what came of it; `ended` is None where it did not finish."""

    started: dict[str, Any]
    ended: float | None = None
    rollouts: list[dict[str, Any]] = field(default_factory=list)


class _Part:
    """What one scheduler did."""

    def __init__(self, events: list[dict[str, Any]]) -> None:
        self._header, self._origin = events[0], float(events[0]["t"])
        self._outside = _from_outside(events)
        self._closed = [e for e in events if e["event"] == "close"]
        self._closed_at = {event["step"]: event["t"] for event in self._closed}
        self._submissions: list[_Submission] = []
        self._verdicts: dict[int, list[dict[str, Any]]] = defaultdict(list)
        self._step = 0
        self._given = 0
        open_by_group: dict[int, _Submission] = {}
        for event in events:
            if event["event"] == "start":
                open_by_group[event["group"]] = _Submission(event)
                self._submissions.append(open_by_group[event["group"]])
            elif event["event"] == "finish":
                submission = open_by_group[event["group"]]
                submission.ended = event["t"]
                submission.rollouts = event["rollouts"]
            elif event["event"] == "judge":
                self._verdicts[event["group"]].append(event)
        self._starts: Counter[int] = Counter()
        self._by_group: dict[int, list[_Submission]] = defaultdict(list)
        for submission in self._submissions:
            self._by_group[submission.started["group"]].append(submission)

    async def run(self) -> list[Closed]:
        loop = asyncio.get_running_loop()
        scheduler = Scheduler(
            source=self,
            run_group=self._run_group,
            policy=_policy(self._header),
            limits=Limits(**self._header["limits"]),
            judge=self._judge,
            finish=self._finish,
            inflight=InFlight(clock=loop.time),
        )
        recorded = {event["step"]: event["groups"] for event in self._closed}
        replayed: dict[int, list[int]] = {}
        collecting: asyncio.Task[Any] | None = None
        async with scheduler:
            for event in self._outside:
                await self._until(event["t"])
                if event["event"] == "hold":
                    scheduler.hold()
                    continue
                if event["event"] == "weights":
                    scheduler.weights_changed(event["version"])
                    continue
                if collecting is not None:
                    await collecting
                if event["step"] in recorded:
                    collecting = asyncio.create_task(self._collect(scheduler, event["step"], replayed))
            if collecting is not None:
                await collecting
        return [Closed(step, groups, replayed.get(step, [])) for step, groups in recorded.items()]

    async def _until(self, recorded: float) -> None:
        """Wait for a moment of the recorded run; starting took time there, and takes none here. A moment that
        has come lets nothing else happen first."""
        seconds = recorded - self._origin - asyncio.get_running_loop().time()
        if seconds > RESOLUTION:
            await asyncio.sleep(seconds)

    async def _collect(self, scheduler: Scheduler, step: int, replayed: dict[int, list[int]]) -> None:
        """Decide a batch; one that cannot be made again is told as one that differs."""
        self._step = step
        with suppress(SlimeError):
            batch = await scheduler.collect(step)
            replayed[step] = [run.key[0] for run in batch.groups]

    def get_samples(self, num_samples: int, /) -> Sequence[Sequence[Member]]:
        """The groups that were started next."""
        taken = self._submissions[self._given : self._given + num_samples]
        self._given += len(taken)
        return [
            [_sample(submission, rollout) for rollout in submission.started["rollouts"]]
            for submission in taken
        ]

    def add_samples(self, groups: list[MemberGroup], /) -> None:
        """What goes back comes again as it was recorded."""

    async def _judge(self, group: MemberGroup, outstanding: int, wanted: int) -> str | None:
        first = group[0][0] if isinstance(group[0], list) else group[0]
        verdicts = self._verdicts[first.group_index or 0]
        if not verdicts:
            return None
        verdict = verdicts.pop(0)
        await self._until(verdict["t"])
        reason: str | None = verdict["reason"]
        return reason

    async def _finish(self, accepted: list[GroupRun], seen: list[GroupRun]) -> None:
        """Hooks of the full batch ended when it closed."""
        await self._until(self._closed_at[self._step])

    async def _run_group(self, group: MemberGroup, step: int, stop: GroupStop) -> list[Rollout]:
        first = group[0]
        assert isinstance(first, Sample) and first.group_index is not None
        submission = self._by_group[first.group_index][self._starts[first.group_index]]
        self._starts[first.group_index] += 1
        if submission.ended is None:
            await asyncio.Event().wait()
        else:
            await self._until(submission.ended)
        return [_rollout(first.group_index, told) for told in submission.rollouts]


def _from_outside(events: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """What came to the scheduler; a step that follows new weights, with nothing decided between, at once."""
    decided = [event for event in events if event["event"] not in ("call", "reward")]
    outside = []
    for before, event in pairwise(decided):
        if event["event"] in ("collect", "hold", "weights"):
            at_once = (before["event"], event["event"]) == ("weights", "collect")
            outside.append({**event, "t": before["t"]} if at_once else event)
    return outside


def _policy(header: dict[str, Any]) -> Policy:
    kind = _POLICIES.get(header["policy"])
    if kind is None:
        raise DataError(f"the policy {header['policy']!r} is not known here", place="events")
    return kind(**header["settings"])


def _sample(submission: _Submission, rollout_id: int) -> Sample:
    """A member as the source gave it; of a group that had tokens, with their version."""
    sample = Sample(group_index=submission.started["group"], index=rollout_id, rollout_id=rollout_id)
    if submission.started["begun"]:
        sample.tokens, sample.response_length = [0, 0], 1
        sample.weight_versions = [str(submission.started["version"])]
    return sample


def _rollout(group_index: int, told: dict[str, Any]) -> Rollout:
    outcomes: dict[str, Outcome] = {
        "completed": Completed(),
        "truncated": Truncated(),
        "aborted": Aborted(told["reason"] or ""),
        "failed": Failed(told["reason"] or "", "", ""),
    }
    sample = Sample(group_index=group_index, index=told["rollout"], rollout_id=told["rollout"])
    sample.tokens, sample.response_length = [0] * (told["tokens"] + 1), told["tokens"]
    sample.weight_versions = [] if told["version"] is None else [str(told["version"])]
    return Rollout(
        group_index=group_index,
        rollout_id=told["rollout"],
        samples=(sample,),
        fan_out=False,
        outcome=outcomes[told["outcome"]],
    )

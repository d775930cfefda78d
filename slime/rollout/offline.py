"""Rollouts and evaluations outside of a run: the groups that a result file lacks, by the runner of training.

Invariant: a group is recorded when it is finished and not before; a rerun does what is missing or failed;
results of two policy versions are never joined. Knows the engine by URL only.
"""

from __future__ import annotations

import json
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from slime.errors import DataError, EngineError
from slime.rollout.failures import FailureBudget
from slime.rollout.group_run import leaves
from slime.rollout.metrics import trained_tokens
from slime.rollout.outcome import Member, MemberGroup, Rollout, failure_reason
from slime.rollout.provenance import digest
from slime.rollout.result_file import GroupRecord, ResultFile, RolloutRecord
from slime.rollout.rewarding import INVALID_KEY
from slime.rollout.runner import Call, RolloutRunner
from slime.rollout.sample_json import to_json
from slime.rollout.scores import Score
from slime.rollout.tasks import all_of

_TOKEN_FIELDS = (
    "tokens",
    "loss_mask",
    "rollout_log_probs",
    "teacher_log_probs",
    "rollout_top_p_token_ids",
    "rollout_top_p_offsets",
    "rollout_routed_experts",
    "multimodal_train_inputs",
)
"""Fields that only training needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One group to be done.

    Attributes:
        data_set: name of its data set.
        reward: the one number of a valid rollout.
    """

    data_set: str
    group: MemberGroup
    runner: RolloutRunner
    call: Call
    reward: Callable[[Rollout], float]

    @property
    def group_index(self) -> int:
        """Of its samples."""
        index = leaves(self.group[0])[0].group_index
        assert index is not None
        return index

    @property
    def prompt(self) -> str:
        """Digest of the prompt."""
        return digest(json.dumps(leaves(self.group[0])[0].prompt))


@dataclass(slots=True, kw_only=True)
class Job:
    """What is done with the missing groups.

    Attributes:
        version: the engine's weight version; an answer of another one ends the job. None where it tells none.
        keeps_tokens: record token ids and log-probs too.
        whole_groups: do a group anew as a whole where one of its rollouts failed.
        width: groups that run at once.
        tell: called after each group with (groups done, groups in all, rollouts failed now).
    """

    results: ResultFile
    budget: FailureBudget
    version: str | None
    keeps_tokens: bool
    whole_groups: bool
    width: int
    tell: Callable[[int, int, int], None] = lambda done, total, failed: None
    done: int = field(default=0, init=False)

    async def run(self, works: Sequence[Work]) -> None:
        """Do what the result file lacks, in order, `width` groups at once.

        Raises:
            RolloutFailedError: too many rollouts failed.
            EngineError: the engine's weights changed.
            DataError: a prompt is not the one that was recorded under its group.
        """
        todo = [(work, members) for work in works if (members := self._missing(work))]
        self.done = len(works) - len(todo)
        waiting = iter(todo)

        async def worker() -> None:
            for work, members in waiting:
                await self._do(work, members)
                self.done += 1
                self.tell(self.done, len(works), self.budget.failed)

        await all_of(worker() for _ in range(min(self.width, len(todo))))

    def missing_rollouts(self, works: Iterable[Work]) -> int:
        """How many rollouts are to be done."""
        return sum(len(self._missing(work)) for work in works)

    def _missing(self, work: Work) -> list[Member]:
        record = self.results.records.get((work.data_set, work.group_index))
        if record is None:
            return list(work.group)
        if record.prompt != work.prompt:
            raise DataError(
                f"group {work.group_index} of {work.data_set} has another prompt than the one recorded",
                place=str(self.results.path),
                remedy="the data source must give the same prompts in the same order; or name another folder",
            )
        done = {rollout.rollout_id for rollout in record.rollouts if rollout.valid}
        missing = [member for member in work.group if _id(member) not in done]
        return list(work.group) if missing and self.whole_groups else missing

    async def _do(self, work: Work, members: list[Member]) -> None:
        started = time.monotonic()
        rollouts = await work.runner.run_group(members, work.call)
        seconds = time.monotonic() - started
        self._check_version(rollouts)
        new = [self._record(rollout, work, seconds) for rollout in rollouts]
        before = self.results.records.get((work.data_set, work.group_index))
        again = {record.rollout_id for record in new}
        kept = [r for r in before.rollouts if r.rollout_id not in again] if before is not None else []
        self.results.append(
            GroupRecord(
                data_set=work.data_set,
                group_index=work.group_index,
                prompt=work.prompt,
                rollouts=sorted([*kept, *new], key=lambda record: record.rollout_id),
            )
        )
        self.budget.record(rollouts)
        self.budget.check()

    def _check_version(self, rollouts: Iterable[Rollout]) -> None:
        """Raises EngineError where a token was sampled by other weights than the results before."""
        if self.version is None:
            return
        for rollout in rollouts:
            for sample in rollout.samples:
                spans = sample.metadata.get("weight_version_spans", ())
                versions = [*sample.weight_versions, *(version for version, _, _ in spans)]
                other = next((version for version in versions if version != self.version), None)
                if other is not None:
                    raise EngineError(
                        f"its weights changed from version {self.version!r} to {other!r} meanwhile",
                        place=f"rollout {rollout.rollout_id}",
                        remedy="evaluate an engine whose weights stay; results so far are kept",
                    )

    def _record(self, rollout: Rollout, work: Work, seconds: float) -> RolloutRecord:
        assert rollout.rollout_id is not None
        samples = [to_json(sample) for sample in rollout.samples]
        if not self.keeps_tokens:
            samples = [{k: v for k, v in sample.items() if k not in _TOKEN_FIELDS} for sample in samples]
        return RolloutRecord(
            rollout_id=rollout.rollout_id,
            outcome=type(rollout.outcome).__name__.lower(),
            reason=failure_reason(rollout.outcome),
            reward=work.reward(rollout) if rollout.valid else None,
            response_length=trained_tokens(rollout.samples),
            seconds=round(rollout.timings.total or seconds, 3),
            samples=samples,
        )


def _id(member: Member) -> int | None:
    base = leaves(member)[0]
    return base.index if base.rollout_id is None else base.rollout_id


@dataclass(frozen=True, slots=True)
class Summary:
    """The results of one data set.

    Attributes:
        failed: rollouts without a score, by reason.
    """

    scores: list[Score]
    failed: Counter[str]


def summaries(records: Iterable[GroupRecord]) -> dict[str, Summary]:
    """Results by data set, in the order of the records; a rollout counts once."""
    by_set: dict[str, Summary] = defaultdict(lambda: Summary([], Counter()))
    for group in records:
        summary = by_set[group.data_set]
        for rollout in group.rollouts:
            if rollout.reward is None:
                summary.failed[rollout.reason or rollout.outcome] += 1
                continue
            summary.scores.append(
                Score(
                    group_index=group.group_index,
                    reward=rollout.reward,
                    truncated=rollout.outcome == "truncated",
                    response_length=rollout.response_length,
                    invalid=any(INVALID_KEY in sample["metadata"] for sample in rollout.samples),
                )
            )
    return dict(by_set)

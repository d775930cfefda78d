"""A group on its way through the scheduler: what it was, the tickets of its rollouts, what came of it.

Invariant: the group that runs and the group that may go back to the data source share no mutable value.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from slime.rollout.accounting import Effort, Fate, Ledger
from slime.rollout.convert import oldest_version
from slime.rollout.origin import origin_of, with_origin
from slime.rollout.outcome import Aborted, Failed, Member, MemberGroup, Rollout, failure_reason
from slime.rollout.pacing import UNBOUNDED
from slime.rollout.stopping import GroupStop, Stop
from slime.utils.types import Sample

FIRST_FILLED_ID = 1 << 40
"""Ids for samples whose data source sets none; far from the counters of those that do."""
_group_ids = itertools.count(FIRST_FILLED_ID)
_sample_ids = itertools.count(FIRST_FILLED_ID)


@dataclass(slots=True)
class GroupRun:
    """One submission of a group.

    Attributes:
        fresh: what goes back to the source if the group does not finish; with how it began, if it had.
        version: the oldest weights that sampled any of it, or under which it starts.
        due: the last step that may train it.
        started, ended: seconds of the scheduler's clock; `ended` is None while it runs.
    """

    fresh: MemberGroup
    tickets: list[int]
    version: int = 0
    due: int = UNBOUNDED
    started: float = 0.0
    ended: float | None = None
    rollouts: list[Rollout] = field(default_factory=list)
    stop: GroupStop = field(default_factory=GroupStop)
    _kept: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self._kept = [_tokens(leaves(member)) for member in self.fresh]

    @property
    def key(self) -> tuple[int, int]:
        """Sort key: group index, then the index of its first sample."""
        first = leaves(self.fresh[0])[0]
        return first.group_index or 0, first.index or 0

    @property
    def members(self) -> MemberGroup:
        """All rollouts as hooks see them."""
        return [rollout.member for rollout in self.rollouts]

    @property
    def valid_members(self) -> MemberGroup:
        """The rollouts that vote."""
        return [rollout.member for rollout in self.rollouts if rollout.valid]

    @property
    def oldest_version(self) -> int:
        """The oldest weights behind a token that would train; that of the start where no engine tells."""
        told = oldest_version(s for rollout in self.rollouts if rollout.valid for s in rollout.samples)
        return self.version if told is None else told

    @property
    def is_cut_empty(self) -> bool:
        """Whether it was cut and too few of its rollouts have anything to train."""
        short = [r for r in self.rollouts if isinstance(r.outcome, Aborted)]
        enough = len(self.valid_members) >= min(2, len(self.rollouts))
        return self.stop.reason is Stop.CUT and bool(short) and not enough

    def resumable(self) -> MemberGroup:
        """The group to go on with: finished rollouts with their rewards, those that were stopped with their
        tokens, and those that failed from the start."""
        if not self.rollouts:
            return self.fresh
        pairs = zip(self.rollouts, self.fresh, strict=True)
        return [self._resumable(rollout, fresh) for rollout, fresh in pairs]

    def from_the_start(self) -> MemberGroup:
        """The group as it was before anything of it was sampled."""
        return [origin_of(member) for member in self.fresh]

    def _resumable(self, rollout: Rollout, fresh: Member) -> Member:
        if rollout.valid:
            return with_origin(rollout.member, fresh)
        if self._continues(rollout):
            sample = rollout.samples[0]
            sample.remove_sample = False
            return with_origin(sample, fresh)
        return fresh

    def _continues(self, rollout: Rollout) -> bool:
        """Whether a rollout was stopped with tokens in one row, from where it can go on; what the hook
        gave up begins again."""
        stopped = self.stop.reason is Stop.CONTINUE and isinstance(rollout.outcome, Aborted)
        sample = rollout.samples[0]
        has_place = sample.response_length > 0 and not sample.metadata.get("abort_reason")
        return stopped and not rollout.fan_out and has_place

    def settle(self, ledger: Ledger, fate: Fate, reason: str = "") -> None:
        """Give the valid rollouts this fate; failed ones are FAILED under their own reason."""
        for slot, ticket in enumerate(self.tickets):
            failed = failure_reason(self.rollouts[slot].outcome) if self.rollouts else None
            chosen = (fate, reason) if failed is None else (Fate.FAILED, failed)
            ledger.settle([ticket], *chosen, self._effort(slot))

    def settle_requeued(self, ledger: Ledger) -> None:
        """Account for a group that goes back, by how each of its rollouts will go on; one that failed has."""
        for slot, ticket in enumerate(self.tickets):
            rollout = self.rollouts[slot] if self.rollouts else None
            if rollout is not None and isinstance(rollout.outcome, Failed):
                ledger.settle([ticket], Fate.FAILED, rollout.outcome.reason, self._effort(slot))
            else:
                ledger.settle([ticket], Fate.REQUEUED, self._requeue_reason(rollout), self._effort(slot))

    def _requeue_reason(self, rollout: Rollout | None) -> str:
        if rollout is not None and rollout.valid:
            return "finished"
        return "continued" if rollout is not None and self._continues(rollout) else "begins again"

    def settle_trained(self, ledger: Ledger) -> None:
        """As `settle`, where what a hook took out of the loss counts as filtered."""
        for slot, (ticket, rollout) in enumerate(zip(self.tickets, self.rollouts, strict=True)):
            failed, effort = failure_reason(rollout.outcome), self._effort(slot)
            if failed is not None:
                ledger.settle([ticket], Fate.FAILED, failed, effort)
            elif rollout.removed:
                ledger.settle([ticket], Fate.FILTERED, "remove_sample", effort)
            else:
                ledger.settle([ticket], Fate.TRAINED, effort=effort)

    def _effort(self, slot: int) -> Effort:
        if not self.rollouts:
            return Effort(seconds=(self.ended or self.started) - self.started)
        rollout = self.rollouts[slot]
        tokens, mask = _tokens(rollout.samples), rollout.samples[0].loss_mask or [1]
        return Effort(rollout.timings.total, tokens - (self._kept[slot] if mask[0] else 0))


def begun_version(members: MemberGroup) -> int | None:
    """The oldest weights that sampled any token of a group that was out before; None where there is none."""
    return oldest_version(s for member in members for s in leaves(member) if s.response_length)


def with_ids(group: Sequence[Member]) -> MemberGroup:
    """The same group, every sample with `group_index` and `index`, unique in the process where missing."""
    members = list(group)
    samples = [sample for member in members for sample in leaves(member)]
    index = next((s.group_index for s in samples if s.group_index is not None), None)
    index = next(_group_ids) if index is None else index
    for sample in samples:
        sample.group_index = index
        sample.index = next(_sample_ids) if sample.index is None else sample.index
    return members


def leaves(member: Member) -> Sequence[Sample]:
    """The samples of one rollout."""
    return member if isinstance(member, list) else [member]


def copy_of(member: Member) -> Member:
    """A deep copy, except that images and other raw inputs are shared: nobody writes to them."""
    shared = {id(s.multimodal_inputs): s.multimodal_inputs for s in leaves(member)}
    return copy.deepcopy(member, shared)


def _tokens(samples: Sequence[Sample]) -> int:
    return sum(sample.effective_response_length for sample in samples)

"""A group on its way through the scheduler: what it was, the tickets of its rollouts, what came of it.

Invariant: the group that runs and the group that may go back to the data source share no mutable value.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from slime.rollout.accounting import Fate, Ledger
from slime.rollout.outcome import Member, MemberGroup, Rollout, failure_reason
from slime.utils.types import Sample

FIRST_FILLED_ID = 1 << 40
"""Ids for samples whose data source sets none; far from the counters of those that do."""
_group_ids = itertools.count(FIRST_FILLED_ID)
_sample_ids = itertools.count(FIRST_FILLED_ID)


@dataclass(slots=True)
class GroupRun:
    """`fresh` is what goes back to the source if the group does not finish."""

    fresh: MemberGroup
    tickets: list[int]
    rollouts: list[Rollout] = field(default_factory=list)

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

    def resumable(self) -> MemberGroup:
        """The finished rollouts with their rewards; those that failed will start afresh."""
        return [
            rollout.member if rollout.valid else fresh
            for rollout, fresh in zip(self.rollouts, self.fresh, strict=True)
        ]

    def settle(self, ledger: Ledger, fate: Fate, reason: str = "") -> None:
        """Give the valid rollouts this fate; failed ones are FAILED under their own reason."""
        for ticket, failed in itertools.zip_longest(self.tickets, map(_failure, self.rollouts)):
            if failed is None:
                ledger.settle([ticket], fate, reason)
            else:
                ledger.settle([ticket], Fate.FAILED, failed)

    def settle_trained(self, ledger: Ledger) -> None:
        """As `settle`, where what a hook took out of the loss counts as filtered."""
        for ticket, rollout in zip(self.tickets, self.rollouts, strict=True):
            failed = _failure(rollout)
            if failed is not None:
                ledger.settle([ticket], Fate.FAILED, failed)
            elif rollout.removed:
                ledger.settle([ticket], Fate.FILTERED, "remove_sample")
            else:
                ledger.settle([ticket], Fate.TRAINED)


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


def _failure(rollout: Rollout) -> str | None:
    return failure_reason(rollout.outcome)

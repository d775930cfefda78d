"""Where a scheduler takes groups from and puts them back: the part of a data source that it uses.

Invariant: a group that the source refuses is named with its rollouts, and keeps no other from going back.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from slime.rollout.group_run import leaves
from slime.rollout.outcome import Member, MemberGroup

logger = logging.getLogger(__name__)


class Source(Protocol):
    """The part of a data source that the scheduler uses."""

    def get_samples(self, num_samples: int, /) -> Sequence[Sequence[Member]]:
        """The next groups; fewer or none where it runs out."""
        ...

    def add_samples(self, groups: Any, /) -> None:
        """Take groups back."""
        ...


def give_back(source: Source, groups: Iterable[MemberGroup], cause: BaseException | None) -> None:
    """Return groups to the source, each by itself.

    Args:
        cause: an error that ends the step already; a refusal is told with it and does not hide it.

    Raises:
        Exception: the first refusal, without a cause.
    """
    refusals = [refusal for group in groups if (refusal := _refusal(source, group)) is not None]
    if not refusals:
        return
    if cause is None:
        raise refusals[0]
    cause.add_note(f"the groups in flight could not go back to the data source: {refusals[0]}")


def _refusal(source: Source, group: MemberGroup) -> Exception | None:
    """What the source raises when it should take this group, named in the log."""
    try:
        source.add_samples([group])
    except Exception as refusal:  # noqa: BLE001 - raised by the caller, when the others have gone back
        ids = [leaves(member)[0].rollout_id for member in group]
        number = leaves(group[0])[0].group_index
        logger.error("group %s, rollouts %s, cannot go back to the data source: %s", number, ids, refusal)
        return refusal
    return None

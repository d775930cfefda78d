"""The call of a buffer filter: it chooses which groups of the buffer come next.

Invariant: a group that is given out is out of the buffer, so that nothing comes twice; what the filter
removes without giving it out is told (law 5).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from slime.rollout.base_types import Group
from slime.rollout.groups import flatten
from slime.rollout.hooks import flag_name, hook_name
from slime.utils.types import Sample
from slime.utils.user_function import UserFunction

logger = logging.getLogger(__name__)
DEST = "buffer_filter_path"


def take_from_buffer(
    hook: Callable[..., Any], args: Any, buffer: list[Group], num_samples: int
) -> list[Group]:
    """The groups that the filter takes out of the buffer.

    Raises:
        HookError: it raised, gave something else than at most `num_samples` groups of the buffer, or left one
            that it gave in it.
    """
    named = UserFunction(f"{flag_name(DEST)} ({hook_name(hook)})", hook)
    before = {_key(group): group for group in buffer}
    taken = named(args, None, buffer, num_samples)
    if not isinstance(taken, list) or len(taken) > num_samples:
        found = f"{len(taken)} groups" if isinstance(taken, list) else type(taken).__name__
        raise named.broke(f"returned {found}, expected a list of up to {num_samples} groups")
    left, given = set(map(_key, buffer)), set(map(_key, taken))
    if given & left or len(given) < len(taken):
        raise named.broke(
            "returned a group twice or left it in the buffer, so that it would come again",
            "remove from the buffer what it returns",
        )
    if given - set(before):
        raise named.broke("returned a group that was not in the buffer", "return groups of the buffer")
    lost = [_group_index(group) for key, group in before.items() if key not in given | left]
    if lost:
        logger.warning("%s removed groups without giving them out: %s", named.name, lost)
    return taken


def _key(group: Group) -> int:
    """What tells groups apart: their first sample, for a filter may make new lists."""
    return id(_first(group) or group)


def _group_index(group: Group) -> int | None:
    first = _first(group)
    return None if first is None else first.group_index


def _first(group: Group) -> Sample | None:
    return next((sample for sample in flatten(group) if isinstance(sample, Sample)), None)

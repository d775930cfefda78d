"""The verdict of a dynamic filter on a group, and the rule that turns verdicts into drops.

Invariant: a group is kept or dropped whole. Knows nothing of rewards.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from slime.errors import HookError
from slime.rollout.hooks import flag_name, hook_name


@dataclass
class DynamicFilterOutput:
    """A filter's verdict.

    Attributes:
        keep: the group may train.
        reason: short word for the metric ``rollout/dynamic_filter/drop_<reason>``.
        keep_when_insufficient: take the group all the same when too few others are left to fill the batch.
    """

    keep: bool
    reason: str | None = None
    keep_when_insufficient: bool = False


def call_dynamic_filter(fn: Callable[..., Any] | None, *args: Any, **kwargs: Any) -> DynamicFilterOutput:
    """Ask a filter ``(args, group, **kwargs)``; no filter keeps everything, and a bare bool is wrapped.

    Raises:
        HookError: the filter returned something else.
    """
    if fn is None:
        return DynamicFilterOutput(keep=True)
    output = fn(*args, **kwargs)
    if isinstance(output, DynamicFilterOutput):
        return output
    if isinstance(output, bool):
        return DynamicFilterOutput(keep=output)
    raise HookError(
        f"{hook_name(fn)} returned {output!r}, expected a bool or a DynamicFilterOutput",
        place=flag_name("dynamic_sampling_filter_path"),
    )


def should_drop_dynamic_filter_output(output: DynamicFilterOutput, remaining: int, target: int) -> bool:
    """Drop iff not `keep`, unless the filter yields when groups run short.

    Args:
        remaining: groups accepted or still running, this one included.
        target: groups that the batch needs.
    """
    return not output.keep and not (output.keep_when_insufficient and remaining <= target)

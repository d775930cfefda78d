"""The hooks that see groups: dynamic filter, sample filter, and the one that sees all samples.

Invariant: filters see valid rollouts only, so no failure is ever compared with a reward. Hooks are loaded and
checked before the first rollout starts; each call has the deadline of a rollout and cannot end the process.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from slime.errors import HookError, SlimeError
from slime.rollout.filter_hub import call_dynamic_filter, should_drop_dynamic_filter_output
from slime.rollout.group_run import GroupRun
from slime.rollout.hook_calls import watched
from slime.rollout.hooks import flag_name, load_hook
from slime.rollout.outcome import MemberGroup
from slime.rollout.tasks import in_thread, rollout_seconds

_FILTER = "dynamic_sampling_filter_path"
_SAMPLE_FILTER = "rollout_sample_filter_path"
_ALL_SAMPLES = "rollout_all_samples_process_path"


class BatchHooks:
    """Hooks of one rollout step.

    Raises:
        HookError: a hook does not import or has the wrong signature.
    """

    def __init__(self, args: Any, data_source: Any) -> None:
        self._args = args
        self._source = data_source
        self._filter = _load(args, _FILTER)
        self._sample_filter = _load(args, _SAMPLE_FILTER)
        self._all_samples = _load(args, _ALL_SAMPLES)

    async def judge(self, group: MemberGroup, outstanding: int, wanted: int) -> str | None:
        """Why the dynamic filter drops a group, or None.

        Raises:
            HookError: the filter raised or broke its contract.
            DeadlineError: it took longer than ``--rollout-timeout``.
        """
        if self._filter is None:
            return None
        ask = functools.partial(call_dynamic_filter, self._filter)
        output = await self._run(_FILTER, ask, _name(group), group)
        drops = should_drop_dynamic_filter_output(output, outstanding, wanted)
        return (output.reason or "filter") if drops else None

    async def finish(self, accepted: list[GroupRun], seen: list[GroupRun]) -> None:
        """Show the full batch to the sample filter, then all groups to the hook that sees everything.

        Raises:
            HookError: a hook raised.
            DeadlineError: one took longer than ``--rollout-timeout``.
        """
        if self._sample_filter is not None:
            groups = [run.valid_members for run in accepted]
            await self._run(_SAMPLE_FILTER, self._sample_filter, "the full batch", groups)
        if self._all_samples is not None:
            groups = [run.members for run in seen]
            await self._run(_ALL_SAMPLES, self._all_samples, "the full batch", groups, self._source)

    async def _run(self, dest: str, hook: Callable[..., Any], place: str, *values: Any) -> Any:
        name = f"{flag_name(dest)} ({getattr(self._args, dest)})"
        return await watched(
            _call(hook, (self._args, *values), name, place),
            seconds=rollout_seconds(self._args),
            what=name,
            place=place,
        )


async def _call(hook: Callable[..., Any], values: tuple[Any, ...], name: str, place: str) -> Any:
    """Call a hook in a thread, where it cannot hold up the event loop; if it is async, await it here."""
    try:
        value = await in_thread(hook, *values)
        return await value if inspect.isawaitable(value) else value
    except SlimeError:
        raise
    except Exception as error:
        raise HookError(f"raised {type(error).__name__}: {error}", place=f"{name} on {place}") from error


def _load(args: Any, dest: str) -> Callable[..., Any] | None:
    path = getattr(args, dest, None)
    return load_hook(path, dest) if path else None


def _name(group: MemberGroup) -> str:
    first = group[0][0] if isinstance(group[0], list) else group[0]
    return f"group {first.group_index}"

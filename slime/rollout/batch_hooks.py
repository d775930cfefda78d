"""The hooks that see groups: dynamic filter, sample filter, and the one that sees all samples.

Invariant: filters see valid rollouts only, so no failure is ever compared with a reward. Hooks are loaded and
checked before the first rollout starts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from slime.errors import HookError, SlimeError
from slime.rollout.filter_hub import call_dynamic_filter, should_drop_dynamic_filter_output
from slime.rollout.group_run import GroupRun
from slime.rollout.hooks import flag_name, load_hook, run_hook
from slime.rollout.outcome import MemberGroup

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

    def judge(self, group: MemberGroup, outstanding: int, wanted: int) -> str | None:
        """Why the dynamic filter drops a group, or None.

        Raises:
            HookError: the filter raised or broke its contract.
        """
        try:
            output = call_dynamic_filter(self._filter, self._args, group)
        except SlimeError:
            raise
        except Exception as error:
            raise HookError(
                f"raised {type(error).__name__}: {error}", place=f"{flag_name(_FILTER)} on {_name(group)}"
            ) from error
        drops = should_drop_dynamic_filter_output(output, outstanding, wanted)
        return (output.reason or "filter") if drops else None

    async def finish(self, accepted: list[GroupRun], seen: list[GroupRun]) -> None:
        """Show the full batch to the sample filter, then all groups to the hook that sees everything.

        Raises:
            HookError: a hook raised.
        """
        if self._sample_filter is not None:
            groups = [run.valid_members for run in accepted]
            await _run(self._sample_filter, _SAMPLE_FILTER, self._args, groups)
        if self._all_samples is not None:
            groups = [run.members for run in seen]
            await _run(self._all_samples, _ALL_SAMPLES, self._args, groups, self._source)


async def _run(hook: Callable[..., Any], dest: str, *args: Any) -> None:
    await run_hook(hook, flag_name(dest), args, {}, allow_sync=True)


def _load(args: Any, dest: str) -> Callable[..., Any] | None:
    path = getattr(args, dest, None)
    return load_hook(path, dest) if path else None


def _name(group: MemberGroup) -> str:
    first = group[0][0] if isinstance(group[0], list) else group[0]
    return f"group {first.group_index}"

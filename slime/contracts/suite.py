"""Which contracts belong to which flag, and the run of all that a command line names.

Invariant: a hook that is named is checked; one that is not is not. The order is that of a rollout.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from slime.contracts import (
    data_source,
    faults,
    generate,
    generate_case,
    group_hooks,
    reward,
    rollout_function,
)
from slime.contracts.data_source import SourceCase
from slime.contracts.finding import Contract, Finding, judge
from slime.contracts.generate_case import GenerateCase
from slime.contracts.group_hooks import HookCase
from slime.contracts.reward import RewardCase
from slime.contracts.rollout_function import FunctionCase
from slime.contracts.stage import Stage
from slime.rollout import hooks
from slime.rollout.hooks import flag_name
from slime.utils.types import Sample

CONTRACTS: dict[str, tuple[Contract, ...]] = {
    data_source.DEST: data_source.CONTRACTS,
    "buffer_filter_path": group_hooks.CONTRACTS["buffer_filter_path"],
    generate_case.DEST: (*generate.CONTRACTS, *faults.CONTRACTS),
    "rollout_sample_hook_path": group_hooks.CONTRACTS["rollout_sample_hook_path"],
    reward.DEST: reward.CONTRACTS,
    "dynamic_sampling_filter_path": group_hooks.CONTRACTS["dynamic_sampling_filter_path"],
    "rollout_sample_filter_path": group_hooks.CONTRACTS["rollout_sample_filter_path"],
    "rollout_all_samples_process_path": group_hooks.CONTRACTS["rollout_all_samples_process_path"],
    "custom_reward_post_process_path": group_hooks.CONTRACTS["custom_reward_post_process_path"],
    "custom_convert_samples_to_train_data_path": group_hooks.CONTRACTS[
        "custom_convert_samples_to_train_data_path"
    ],
    "custom_rollout_log_function_path": group_hooks.CONTRACTS["custom_rollout_log_function_path"],
    "custom_eval_rollout_log_function_path": group_hooks.CONTRACTS["custom_eval_rollout_log_function_path"],
    rollout_function.DEST: rollout_function.CONTRACTS,
    rollout_function.EVAL_DEST: rollout_function.EVAL_CONTRACTS,
}
CONTRACTS |= {dest: (group_hooks.takes_the_call,) for dest in hooks.CONTRACTS if dest not in CONTRACTS}
"""Name on `args` of a hook -> its contracts. Of hooks of the trainer only the call; `--arithmetic` tries
them."""


def named_hooks(stage: Stage, dests: Sequence[str] = tuple(CONTRACTS)) -> list[tuple[str, str]]:
    """(dest, path) of the hooks that the stage's arguments name and that are not slime's own default."""
    found = []
    for dest in dests:
        value = getattr(stage.args, dest)
        paths = value if isinstance(value, list) else [value]
        found += [(dest, path) for path in paths if path and path != _DEFAULTS.get(dest)]
    return found


def case_of(stage: Stage, dest: str, path: str, samples: list[Sample] | None = None) -> Any:
    """The subject of the contracts of `dest`.

    Args:
        samples: finished rollouts, for a reward to judge.
    """
    if dest == generate_case.DEST:
        return GenerateCase(stage, path)
    if dest == reward.DEST:
        return RewardCase(stage, path, samples)
    if dest == data_source.DEST:
        return SourceCase(stage, dest, path)
    if dest in (rollout_function.DEST, rollout_function.EVAL_DEST):
        return FunctionCase(stage, dest, path)
    return HookCase(stage, dest, path)


def findings(stage: Stage, named: Sequence[tuple[str, str]]) -> Iterator[Finding]:
    """All contracts of these hooks, one after the other; the reward judges what the generate hook gave."""
    samples: list[Sample] | None = None
    for dest, path in named:
        case = case_of(stage, dest, path, samples)
        for contract in CONTRACTS[dest]:
            yield judge(contract, case, f"{flag_name(dest)} {path}")
        if isinstance(case, GenerateCase):
            samples = case.rollout_samples


_DEFAULTS = {
    data_source.DEST: "slime.rollout.data_source.RolloutDataSourceWithBuffer",
    rollout_function.DEST: "slime.rollout.sglang_rollout.generate_rollout",
}

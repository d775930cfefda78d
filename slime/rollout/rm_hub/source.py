"""A check at start-up that rewards can come from somewhere, before any rollout is paid for.

It knows which settings give rewards; whether a hook really sets one shows only when it runs.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from slime.errors import ConfigError
from slime.rollout.rm_hub.builtin import BOXED, check_rm_type
from slime.rollout.rm_hub.judge import judge_settings
from slime.utils.types import Sample

DEFAULT_ROLLOUT = "slime.rollout.sglang_rollout.generate_rollout"
DEFAULT_SOURCES = (
    "slime.rollout.data_source.RolloutDataSource",
    "slime.rollout.data_source.RolloutDataSourceWithBuffer",
)


def check_reward_source(args: Any, samples: Iterable[Sample] | None) -> None:
    """Check that training rollouts can get a reward.

    User code (rollout function, generate or sample hook, data source without a data set) may set rewards
    itself, and is believed to.

    Args:
        args: reads rm_type, custom_rm_path and the paths of that user code.
        samples: the data set, or None where there is none.

    Raises:
        ConfigError: a reward type does not exist (names the nearest), a judge lacks a setting, or there is no
            reward.
    """
    if getattr(args, "custom_rm_path", None) or _is_set(args, "rollout_function_path", DEFAULT_ROLLOUT):
        return
    rm_type = getattr(args, "rm_type", None)
    if rm_type:
        check_rm_type(rm_type, "--rm-type")
        if rm_type.removeprefix(BOXED) == "judge":
            judge_settings(args)
        return
    if _user_code(args, samples):
        return
    own = [sample for sample in samples or [] if sample.custom_rm_path or sample.metadata.get("rm_type")]
    if not own:
        raise ConfigError(
            "no reward is configured, and no row of the data names one",
            place="--rm-type, --custom-rm-path",
            remedy="set one of them, or metadata.rm_type in the data",
        )
    for sample in own:
        if not sample.custom_rm_path:
            check_rm_type(sample.metadata["rm_type"], "metadata.rm_type of --prompt-data")


def _user_code(args: Any, samples: Iterable[Sample] | None) -> bool:
    """True where code of the user's own sees samples before their reward is due."""
    hooks = ("custom_generate_function_path", "rollout_sample_hook_path")
    if any(getattr(args, name, None) for name in hooks):
        return True
    return samples is None and _is_set(args, "data_source_path", *DEFAULT_SOURCES)


def _is_set(args: Any, name: str, *defaults: str) -> bool:
    value = getattr(args, name, None)
    return bool(value) and value not in defaults

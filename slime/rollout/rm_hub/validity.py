"""What counts as a reward: a finite number, a list of them (one a turn or token), or a dict with either under
a reward key.

Invariant: everything else is an error; a failure is never a number (law 4).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Real
from typing import Any

from slime.errors import RewardError
from slime.train.rewards import check_listed, is_listed_form, read_reward
from slime.utils.types import Sample

Reward = float | list[float] | dict[str, Any]


def sample_name(sample: Sample) -> str:
    """Place of an error: which sample of which rollout."""
    return f"sample {sample.index} (rollout {sample.rollout_id})"


def checked_reward(value: Any, *, source: str, sample: Sample, args: Any) -> Reward:
    """The reward, numbers as float; a dict needs one under a reward key.

    Raises:
        RewardError: None, NaN, infinite, of another type, or a list that does not fit the response; names
            source, sample and value, or lengths.
    """
    if isinstance(value, dict) and not is_listed_form(value):
        return _checked_dict(value, source, sample, args)
    return _checked_value(value, source, sample)


def reward_source(sample: Sample, args: Any) -> str:
    """Where the sample's reward comes from, for messages; user code may also have set it."""
    rm_type = sample.metadata.get("rm_type") or getattr(args, "rm_type", None)
    hook = sample.custom_rm_path or getattr(args, "custom_rm_path", None)
    return hook or (f"reward {rm_type!r}" if rm_type else "reward")


def check_reward_key(reward: Reward, *, sample: Sample, args: Any, evaluation: bool = False) -> None:
    """Check that the scalar of a reward can be read under the key of training or of evaluation.

    Raises:
        RewardError: no such key; names the flag, the key and the keys that are there.
    """
    flag, key = reward_key(args, evaluation)
    named = isinstance(reward, dict) and not is_listed_form(reward)
    if (isinstance(reward, dict) and key in reward) if named else key is None:
        return
    found = (
        f"a dict with the keys {sorted(map(str, reward))}"
        if isinstance(reward, dict) and named
        else f"{reward!r}"
    )
    mode = "evaluation" if evaluation else "training"
    raise RewardError(
        f"the reward is {found}, {mode} reads {'a number' if key is None else f'the key {key!r}'} ({flag})",
        place=sample_name(sample),
        remedy=f"set {flag} to a key that every reward has, or to none where rewards are numbers",
        reason="no_key",
    )


def reward_key(args: Any, evaluation: bool = False) -> tuple[str, str | None]:
    """The flag that names the key of the scalar, and the key; evaluation falls back to that of training."""
    own: str | None = getattr(args, "eval_reward_key", None)
    if evaluation and own is not None:
        return "--eval-reward-key", own
    return "--reward-key", getattr(args, "reward_key", None)


def _checked_dict(value: dict[str, Any], source: str, sample: Sample, args: Any) -> dict[str, Any]:
    keys = [getattr(args, name, None) for name in ("reward_key", "eval_reward_key")]
    held = {key: value[key] for key in keys if key is not None and key in value}
    if not held:
        wanted = " or ".join(repr(key) for key in keys if key is not None) or "a key named by --reward-key"
        raise RewardError(
            f"{source} returned a dict with the keys {sorted(map(str, value))}, without {wanted}",
            place=sample_name(sample),
            remedy="set --reward-key to the key of the scalar reward",
            reason="no_key",
        )
    read = {key: _checked_value(item, f"{source}[{key!r}]", sample) for key, item in held.items()}
    return {**value, **read}


def _checked_value(value: Any, source: str, sample: Sample) -> Reward:
    if isinstance(value, Real) and math.isfinite(value):
        return float(value)
    if isinstance(value, list | tuple) or is_listed_form(value):
        place = f"{sample_name(sample)}, {source}"
        mask = [1] * sample.response_length if sample.loss_mask is None else sample.loss_mask
        check_listed(read_reward(value, place=place), mask, place=place)
        return dict(value) if isinstance(value, Mapping) else list(value)
    raise RewardError(
        f"{source} returned {value!r}, which is not a finite number",
        place=sample_name(sample),
        remedy="return a finite number, or raise to make the rollout fail with a reason",
        reason="no_number",
    )

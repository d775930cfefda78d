"""What counts as a reward: a finite number, or a dict with one under a reward key.

Invariant: everything else is an error; a failure is never a number (law 4).
"""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

from slime.errors import RewardError
from slime.utils.types import Sample

Reward = float | dict[str, Any]


def sample_name(sample: Sample) -> str:
    """Place of an error: which sample of which rollout."""
    return f"sample {sample.index} (rollout {sample.rollout_id})"


def checked_reward(value: Any, *, source: str, sample: Sample, args: Any) -> Reward:
    """The reward, numbers as float; a dict needs a finite number under a reward key.

    Raises:
        RewardError: None, NaN, infinite or of another type; names source, sample and value.
    """
    if isinstance(value, dict):
        return _checked_dict(value, source, sample, args)
    return _checked_number(value, source, sample)


def check_reward_key(reward: Reward, *, sample: Sample, args: Any, evaluation: bool = False) -> None:
    """Check that the scalar of a reward can be read under the key of training or of evaluation.

    Raises:
        RewardError: no such key; names the flag, the key and the keys that are there.
    """
    flag, key = reward_key(args, evaluation)
    if key in reward if isinstance(reward, dict) else key is None:
        return
    found = f"a dict with the keys {sorted(map(str, reward))}" if isinstance(reward, dict) else repr(reward)
    mode = "evaluation" if evaluation else "training"
    raise RewardError(
        f"the reward is {found}, {mode} reads {'a number' if key is None else f'the key {key!r}'} ({flag})",
        place=sample_name(sample),
        remedy=f"set {flag} to a key that every reward has, or to none where rewards are numbers",
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
        )
    scalars = {key: _checked_number(item, f"{source}[{key!r}]", sample) for key, item in held.items()}
    return {**value, **scalars}


def _checked_number(value: Any, source: str, sample: Sample) -> float:
    if isinstance(value, Real) and math.isfinite(value):
        return float(value)
    raise RewardError(
        f"{source} returned {value!r}, which is not a finite number",
        place=sample_name(sample),
        remedy="return a finite number, or raise to make the rollout fail with a reason",
    )

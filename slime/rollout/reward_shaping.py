"""The user's reward post-processing: it shapes the rewards of a whole step, in place of normalisation.

Invariant: the hook sees the samples that vote, and only those (law 4); what it returns is one raw and one
shaped reward a sample, checked by name. Knows nothing of estimators.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real
from typing import Any

from slime.rollout.hook_calls import call_step_hook
from slime.rollout.hooks import flag_name, load_hook
from slime.rollout.rm_hub.validity import sample_name
from slime.train.batch import Reward
from slime.train.rewards import read_reward
from slime.utils.types import Sample
from slime.utils.user_function import UserFunction

DEST = "custom_reward_post_process_path"


def shaped_rewards(samples: Sequence[Sample], args: Any) -> list[Reward] | None:
    """What ``--custom-reward-post-process-path`` makes of the rewards, or None without it.

    The hook is ``(args, samples) -> (raw_rewards, rewards)``, one of each a sample. The raw ones are kept in
    ``metadata["raw_reward"]``, where metrics find them, unless the sample has one already.

    Raises:
        HookError: it raised, or did not return two lists of one reward a sample.
        DeadlineError: it took longer than ``--rollout-timeout``.
        RewardError: a reward of another form, or not finite; names hook, rollout and sample.
    """
    path = getattr(args, DEST, None)
    if not path or not samples:
        return None
    hook = UserFunction(f"{flag_name(DEST)} ({path})", load_hook(path, DEST))
    raw, shaped = _lists(
        hook, call_step_hook(hook, args, args, list(samples), place=f"{len(samples)} samples"), len(samples)
    )
    for sample, value in zip(samples, raw, strict=True):
        if not isinstance(value, Real) or not math.isfinite(value):
            raise hook.broke(f"raw reward {value!r} of {sample_name(sample)} is no finite number")
        sample.metadata.setdefault("raw_reward", float(value))
    return [
        read_reward(value, place=f"{hook.name}, {sample_name(sample)}")
        for sample, value in zip(samples, shaped, strict=True)
    ]


def _lists(hook: UserFunction, answer: Any, count: int) -> tuple[Sequence[Any], Sequence[Any]]:
    """Both lists, plain ones also where they came as arrays or tensors."""
    if not isinstance(answer, tuple | list) or len(answer) != 2:
        raise hook.broke(f"returned {answer!r:.80}, expected (raw_rewards, rewards)")
    raw, shaped = (value.tolist() if hasattr(value, "tolist") else value for value in answer)
    for name, value in (("raw_rewards", raw), ("rewards", shaped)):
        if not isinstance(value, list | tuple) or len(value) != count:
            found = f"{len(value)}" if isinstance(value, list | tuple) else type(value).__name__
            raise hook.broke(f"returned {found} {name} for {count} samples")
    return raw, shaped

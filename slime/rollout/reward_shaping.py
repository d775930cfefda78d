"""The user's reward post-processing: it shapes the rewards of a whole step, in place of normalisation.

Invariant: the hook sees the samples that vote, and only those (law 4); what it returns is one raw and one
shaped reward a sample, checked by name. Knows nothing of estimators.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real
from typing import Any

from slime.errors import HookError, SlimeError
from slime.rollout.hooks import flag_name, load_hook
from slime.rollout.rm_hub.validity import sample_name
from slime.train.batch import Reward
from slime.train.rewards import read_reward
from slime.utils.types import Sample

DEST = "custom_reward_post_process_path"


def shaped_rewards(samples: Sequence[Sample], args: Any) -> list[Reward] | None:
    """What ``--custom-reward-post-process-path`` makes of the rewards, or None without it.

    The hook is ``(args, samples) -> (raw_rewards, rewards)``, one of each a sample. The raw ones are kept in
    ``metadata["raw_reward"]``, where metrics find them, unless the sample has one already.

    Raises:
        HookError: it raised, or did not return two lists of one reward a sample.
        RewardError: a reward of another form, or not finite; names hook, rollout and sample.
    """
    path = getattr(args, DEST, None)
    if not path or not samples:
        return None
    place = f"{flag_name(DEST)} ({path})"
    raw, shaped = _lists(_call(path, place, args, list(samples)), len(samples), place)
    for sample, value in zip(samples, raw, strict=True):
        if not isinstance(value, Real) or not math.isfinite(value):
            raise HookError(f"raw reward {value!r} of {sample_name(sample)} is no finite number", place=place)
        sample.metadata.setdefault("raw_reward", float(value))
    return [
        read_reward(value, place=f"{place}, {sample_name(sample)}")
        for sample, value in zip(samples, shaped, strict=True)
    ]


def _call(path: str, place: str, args: Any, samples: list[Sample]) -> Any:
    hook = load_hook(path, DEST)
    try:
        return hook(args, samples)
    except SlimeError:
        raise
    except Exception as error:
        raise HookError(f"raised {type(error).__name__}: {error}", place=place) from error


def _lists(answer: Any, count: int, place: str) -> tuple[Sequence[Any], Sequence[Any]]:
    """Both lists, plain ones also where they came as arrays or tensors."""
    if not isinstance(answer, tuple | list) or len(answer) != 2:
        raise HookError(f"returned {answer!r:.80}, expected (raw_rewards, rewards)", place=place)
    raw, shaped = (value.tolist() if hasattr(value, "tolist") else value for value in answer)
    for name, value in (("raw_rewards", raw), ("rewards", shaped)):
        if not isinstance(value, list | tuple) or len(value) != count:
            found = f"{len(value)}" if isinstance(value, list | tuple) else type(value).__name__
            raise HookError(f"returned {found} {name} for {count} samples", place=place)
    return raw, shaped

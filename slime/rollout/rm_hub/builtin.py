"""The built-in reward types by name, and the ``boxed_`` prefix.

A check is a pure function of texts that runs in the worker pool; `remote_rm` and `random` need no check.
"""

from __future__ import annotations

import asyncio
import difflib
import random
from collections.abc import Awaitable, Callable
from typing import Any

from slime.errors import ConfigError, RewardError
from slime.rollout.rm_hub.boxed import boxed_answer
from slime.rollout.rm_hub.pool import shared_pool
from slime.rollout.rm_hub.validity import sample_name
from slime.utils.http_utils import HttpError, post
from slime.utils.types import Sample

BOXED = "boxed_"
REMOTE_RETRIES = 9
DEFAULT_WORKERS = 2
"""As the flag's default."""

CHECKS = {
    "math": "slime.rollout.rm_hub.math_utils.math_reward",
    "f1": "slime.rollout.rm_hub.f1.f1_reward",
}
"""Type -> function (response, label) -> reward, run in the pool."""


async def builtin_reward(rm_type: str, args: Any, sample: Sample, timeout_s: float) -> Any:
    """The raw value of a built-in reward.

    Args:
        rm_type: a type, or ``boxed_<type>`` to judge only the content of the last box.
        timeout_s: deadline of the check.

    Raises:
        ConfigError: no such type; names the nearest.
        RewardError: the check broke, hung, or has no label.
    """
    check_rm_type(rm_type, "--rm-type")
    name = rm_type.removeprefix(BOXED)
    response = sample.response
    if name != rm_type and name != "math":  # the math check reads the box itself
        response = boxed_answer(response) or ""
    if name in CHECKS:
        return await _check(CHECKS[name], args, sample, response, timeout_s)
    return await _DIRECT[name](args, sample, response, timeout_s)


def check_rm_type(rm_type: str, place: str) -> None:
    """Check that a reward type exists, with or without ``boxed_``.

    Raises:
        ConfigError: it does not; names the nearest.
    """
    name = rm_type.strip().removeprefix(BOXED)
    known = [*CHECKS, *_DIRECT]
    if name in known:
        return
    near = difflib.get_close_matches(name, known, n=1)
    raise ConfigError(
        f"unknown reward type {rm_type!r}" + (f"; did you mean {near[0]!r}?" if near else ""),
        place=place,
        remedy=f"one of {', '.join(known)}, with {BOXED} before it or not; or --custom-rm-path",
    )


async def _check(path: str, args: Any, sample: Sample, response: str, timeout_s: float) -> Any:
    if sample.label is None or str(sample.label).strip() == "":
        raise RewardError(
            "has no label to check against", place=sample_name(sample), remedy="set --label-key"
        )
    pool = shared_pool(int(getattr(args, "reward_num_workers", None) or DEFAULT_WORKERS))
    return await pool.run(path, (response, str(sample.label)), timeout_s=timeout_s, place=sample_name(sample))


async def _random(args: Any, sample: Sample, response: str, timeout_s: float) -> float:
    """A coin; for a sample with an index the same one whenever it is asked for."""
    if sample.index is None:
        return float(random.randint(0, 1))
    return float(random.Random(f"{getattr(args, 'rollout_seed', 42)} {sample.index}").randint(0, 1))


async def _remote(args: Any, sample: Sample, response: str, timeout_s: float) -> Any:
    """POST ``{prompt, response, label}`` to `args.rm_url`; the JSON answer is the reward."""
    url = getattr(args, "rm_url", None)
    if not url:
        raise ConfigError("remote_rm needs an address", place="--rm-url", remedy="set --rm-url")
    payload = {"prompt": sample.prompt, "response": response, "label": sample.label}
    try:
        async with asyncio.timeout(timeout_s):
            return await post(url, payload, REMOTE_RETRIES, timeout=timeout_s)
    except TimeoutError as error:
        raise RewardError(
            f"remote_rm at {url} gave no reward within {timeout_s:g} s", place=sample_name(sample)
        ) from error
    except HttpError as error:
        raise RewardError(f"remote_rm failed: {error}", place=sample_name(sample)) from error


_DIRECT: dict[str, Callable[[Any, Sample, str, float], Awaitable[Any]]] = {
    "remote_rm": _remote,
    "random": _random,
}

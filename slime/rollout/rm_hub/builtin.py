"""The built-in reward types by name, and the ``boxed_`` prefix.

A check is a pure function of texts that runs in the worker pool; `remote_rm`, `judge` and `random` need none.
Invariant: what a check says of an answer that is missing is kept as `Invalid`.
"""

from __future__ import annotations

import dataclasses
import difflib
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from slime.errors import ConfigError, RewardError
from slime.rollout.rm_hub import gpqa, ifbench
from slime.rollout.rm_hub.boxed import boxed_answer
from slime.rollout.rm_hub.http import post_json
from slime.rollout.rm_hub.judge import judge_reward
from slime.rollout.rm_hub.pool import shared_pool
from slime.rollout.rm_hub.validity import sample_name
from slime.rollout.rm_hub.verdict import Invalid
from slime.utils.types import Sample

BOXED = "boxed_"
NO_BOX = "no_box"
DEFAULT_WORKERS = 2
"""As the flag's default."""
_HUB = "slime.rollout.rm_hub."


@dataclass(frozen=True, slots=True)
class Check:
    """A reward that is computed in the pool.

    Attributes:
        function: dotted path of ``(response, label[, metadata]) -> reward or Invalid``.
        metadata: keys of `Sample.metadata` that it reads; a label may be missing where one of them is there.
        boxed: the function for ``boxed_``, where it reads the box itself.
    """

    function: str
    metadata: tuple[str, ...] = ()
    boxed: str | None = None


CHECKS = {
    "math": Check(_HUB + "math_utils.math_check", boxed=_HUB + "math_utils.math_check"),
    "deepscaler": Check(_HUB + "deepscaler.deepscaler_check", boxed=_HUB + "deepscaler.deepscaler_check"),
    "dapo": Check(_HUB + "math_dapo_utils.dapo_check", boxed=_HUB + "math_dapo_utils.boxed_dapo_check"),
    "f1": Check(_HUB + "f1.f1_reward"),
    "gpqa": Check(_HUB + "gpqa.gpqa_check", gpqa.METADATA_KEYS),
    "ifbench": Check(_HUB + "ifbench.ifbench_check", ifbench.METADATA_KEYS),
}


async def builtin_reward(rm_type: str, args: Any, sample: Sample, timeout_s: float) -> Any:
    """The raw value of a built-in reward, or `Invalid` with it.

    Args:
        rm_type: a type, or ``boxed_<type>`` to judge only the content of the last box.
        timeout_s: deadline of the check.

    Raises:
        ConfigError: no such type; names the nearest.
        RewardError: the check broke, hung, or has no label.
    """
    check_rm_type(rm_type, "--rm-type")
    name = rm_type.removeprefix(BOXED)
    check = CHECKS.get(name)
    response = sample.response
    if name != rm_type and check is not None and check.boxed:
        check = dataclasses.replace(check, function=check.boxed)
    elif name != rm_type:
        box = boxed_answer(response)
        if box is None and check is not None:
            return _without_box(await _check(check, args, sample, "", timeout_s))
        response = box or ""
    if check is not None:
        return await _check(check, args, sample, response, timeout_s)
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


def _without_box(value: Any) -> Invalid:
    """What an empty answer scores, for the reason that there is no box."""
    return Invalid(value.reward if isinstance(value, Invalid) else value, NO_BOX)


async def _check(check: Check, args: Any, sample: Sample, response: str, timeout_s: float) -> Any:
    label: Any = sample.label
    if isinstance(label, int | float):
        label = str(label)
    metadata = {key: sample.metadata[key] for key in check.metadata if key in sample.metadata}
    if (label is None or (isinstance(label, str) and not label.strip())) and not metadata:
        raise RewardError(
            "has no label to check against",
            place=sample_name(sample),
            remedy="set --label-key",
            reason="no_label",
        )
    arguments = (response, label, metadata) if check.metadata else (response, str(label))
    pool = shared_pool(int(getattr(args, "reward_num_workers", None) or DEFAULT_WORKERS))
    return await pool.run(check.function, arguments, timeout_s=timeout_s, place=sample_name(sample))


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
    return await post_json(url, payload, timeout_s=timeout_s, place=sample_name(sample))


_DIRECT: dict[str, Callable[[Any, Sample, str, float], Awaitable[Any]]] = {
    "remote_rm": _remote,
    "judge": judge_reward,
    "random": _random,
}

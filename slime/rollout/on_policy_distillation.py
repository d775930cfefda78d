"""On-policy distillation: a teacher behind an engine's ``/generate`` scores what the student sampled.

Two hooks: `ask_teacher`, a sample hook, goes with any reward; `reward_func`, a reward hook, is for training
on the teacher alone. Invariant: the ids that the teacher scored are the sample's, or it is an error; an
answer that fails is never a number. Knows HTTP; knows no advantages.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import Any

from slime.errors import ConfigError, RewardError
from slime.rollout.rm_hub.validity import sample_name
from slime.utils.http_utils import HttpError, post
from slime.utils.types import Sample

_VOID = (Sample.Status.FAILED, Sample.Status.ABORTED)
_RETRIES = 9
DEFAULT_SECONDS = 60.0
"""As the default of ``--reward-timeout``."""


async def ask_teacher(args: Any, sample: Sample, *, evaluation: bool = False) -> None:
    """Sample hook: set `teacher_log_probs`, one a response token; not in evaluation.

    Args:
        args: reads rm_url (the teacher's ``/generate``) and reward_timeout.

    Raises:
        ConfigError: no ``--rm-url``.
        RewardError: the teacher cannot be reached, or did not score these tokens; names sample and lengths.
    """
    if evaluation or sample.status in _VOID or not sample.response_length:
        return
    url = getattr(args, "rm_url", None)
    if not url:
        raise ConfigError("the teacher needs an address", place="--rm-url", remedy="its URL with /generate")
    sample.teacher_log_probs = _scores(await _ask(args, url, sample), sample, url)


async def reward_func(args: Any, sample: Sample, **kwargs: Any) -> float:
    """Reward hook of a run that learns from the teacher alone: it asks the teacher, and every reward is 0."""
    await ask_teacher(args, sample)
    return 0.0


def post_process_rewards(args: Any, samples: Sequence[Sample]) -> tuple[list[float], list[float]]:
    """Reward post-processing that leaves rewards as they are, for commands that name one."""
    rewards = [sample.get_reward_value(args) for sample in samples]
    return rewards, list(rewards)


async def _ask(args: Any, url: str, sample: Sample) -> Any:
    seconds = float(getattr(args, "reward_timeout", None) or DEFAULT_SECONDS)
    payload = {
        "input_ids": list(sample.tokens),
        "sampling_params": {"temperature": 0, "max_new_tokens": 0, "skip_special_tokens": False},
        "return_logprob": True,
        "logprob_start_len": max(len(sample.tokens) - sample.response_length - 1, 0),
    }
    try:
        async with asyncio.timeout(seconds):
            return await post(url, payload, _RETRIES, timeout=seconds)
    except TimeoutError as error:
        raise RewardError(
            f"the teacher at {url} gave no answer within {seconds:g} s",
            place=sample_name(sample),
            remedy="raise --reward-timeout",
        ) from error
    except HttpError as error:
        raise RewardError(f"the teacher failed: {error}", place=sample_name(sample)) from error


def _scores(answer: Any, sample: Sample, url: str) -> list[float]:
    """Log-probs of the response in an answer of ``/generate``, each checked to be of its token."""
    meta = answer.get("meta_info") if isinstance(answer, dict) else None
    entries = meta.get("input_token_logprobs") if isinstance(meta, dict) else None
    wanted = sample.tokens[-sample.response_length :]
    if not isinstance(entries, list) or len(entries) < len(wanted):
        found = f"{len(entries)} log-probs" if isinstance(entries, list) else "no input_token_logprobs"
        raise RewardError(
            f"the teacher at {url} gave {found} for a response of {len(wanted)} tokens",
            place=sample_name(sample),
            remedy="it must speak SGLang's native /generate with return_logprob and logprob_start_len",
        )
    scores = []
    for position, (entry, token) in enumerate(zip(entries[-len(wanted) :], wanted, strict=True)):
        value, scored = entry[0], entry[1]
        if scored != token or not isinstance(value, float | int) or not math.isfinite(value):
            raise RewardError(
                f"the teacher at {url} scored token {scored} with {value!r} at response token {position} of "
                f"{len(wanted)}, which is token {token}",
                place=sample_name(sample),
                remedy="the teacher must have the student's tokenizer",
            )
        scores.append(float(value))
    return scores

"""How a rollout began, kept with it where it goes back to the data source with what it has.

Invariant: a rollout that begins again is what the data source gave first, whatever hooks made of it since.
The record is plain values on the first sample of the rollout, so every buffer and checkpoint keeps it; what
runs and what trains has none. Knows samples, nothing of scheduling.
"""

from __future__ import annotations

import copy
import logging
from typing import Any

from slime.rollout.outcome import Member
from slime.utils.types import Sample

KEY = "began_as"
"""Attribute of a sample."""
_OF_A_RUN = frozenset(
    {
        *("weight_version_spans", "start_rollout_id", "cut", "segment", "abort_reason", "failure"),
        *("before_failure", "raw_reward", "reward_invalid", "trajectory", "truncated", "use_tool"),
        "ill_formed",
    }
)
"""Metadata that a rollout writes, besides what its hook does."""
logger = logging.getLogger(__name__)


def origin_of(member: Member) -> Member:
    """What a rollout began as; of one that has not begun, itself."""
    record = _first(member).__dict__.get(KEY)
    if isinstance(record, list):
        return [_restored(data) for data in record]
    if record is not None:
        return _restored(record)
    return _guessed(member) if _has_begun(member) else member


def with_origin(member: Member, before: Member) -> Member:
    """A shallow copy of a rollout that keeps how it began, where that is known.

    Args:
        before: the rollout when it was given out last.
    """
    rest = member[1:] if isinstance(member, list) else []
    first = copy.copy(_first(member))
    if (record := _record(before)) is not None:
        first.__dict__[KEY] = record
    return [first, *rest] if isinstance(member, list) else first


def without_origin(member: Member) -> Member:
    """The same rollout, with its record taken off."""
    _first(member).__dict__.pop(KEY, None)
    return member


def _record(before: Member) -> Any:
    record = _first(before).__dict__.get(KEY)
    if record is not None or _has_begun(before):
        return record
    return [sample.to_dict() for sample in before] if isinstance(before, list) else before.to_dict()


def _has_begun(member: Member) -> bool:
    samples = member if isinstance(member, list) else [member]
    return any(s.status is not Sample.Status.PENDING or s.response_length for s in samples)


def _restored(record: dict[str, Any]) -> Sample:
    images = record["multimodal_inputs"]
    return Sample.from_dict(copy.deepcopy(record, {id(images): images}))


def _guessed(member: Member) -> Sample:
    """What a rollout with tokens began as, of which the data source keeps no record: what its first sample
    tells without its response."""
    first = _first(member)
    logger.warning("rollout %s has no record of how it began: its first row tells", first.rollout_id)
    prompt = [] if isinstance(member, list) else first.tokens[: first.prompt_length]
    return Sample(
        group_index=first.group_index,
        index=first.index,
        rollout_id=first.rollout_id,
        prompt=first.prompt,
        tokens=prompt,
        multimodal_inputs=first.multimodal_inputs,
        apply_chat_template_kwargs=first.apply_chat_template_kwargs,
        label=first.label,
        metadata={k: v for k, v in first.metadata.items() if k not in _OF_A_RUN},
        generate_function_path=first.generate_function_path,
        custom_rm_path=first.custom_rm_path,
    )


def _first(member: Member) -> Sample:
    return member[0] if isinstance(member, list) else member

"""From groups of Samples to the rows that training takes.

Invariant: every sample becomes exactly one `TrainSample`, in order, with the ids that it carries; what may
not train does not vote, and its reward is NaN, so that a use of it by mistake shows (law 4).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from slime.errors import DataError
from slime.rollout.boundary import check_trainable, vocabulary_size
from slime.rollout.groups import flatten, rollouts_of
from slime.rollout.reward_shaping import shaped_rewards
from slime.rollout.rm_hub.validity import check_reward_key, checked_reward, reward_source, sample_name
from slime.rollout.train_data import ConvertedRow, converted_rows
from slime.train.batch import Reward, TrainSample
from slime.train.rewards import check_listed, read_reward
from slime.utils.routes import Routes, shape_of_folder, shaped_routes
from slime.utils.types import Sample

__all__ = ["flatten", "policy_version", "to_train_samples"]
PLACE = "rollout function"
_VOID = (Sample.Status.FAILED, Sample.Status.ABORTED)


def to_train_samples(groups: Iterable[Any], args: Any) -> list[TrainSample]:
    """Convert the groups of a rollout step, flat or nested.

    Ids that a rollout function left unset are filled with fresh ones. `TrainSample.index` counts the samples
    as `flatten(groups)` gives them; with ``--custom-convert-samples-to-train-data-path`` the rows of the
    hook, and after them the samples that do not vote, which it does not see (law 4).

    Raises:
        HookError, RewardError: a voting sample or a row of the hook that cannot train; names field and
            lengths.
        DataError: one rollout id in two groups, a weight version that is not a number, or a voting sample
            with images.
    """
    listed = [group if isinstance(group, list) else [group] for group in groups]
    _fill_ids(listed)
    _check_rollout_ids(listed)
    samples = list(flatten(listed))
    voting = [sample for sample in samples if _votes(sample)]
    converted = converted_rows(voting, args)
    if converted is not None:
        void = [sample for sample in samples if not _votes(sample)]
        rows = [_converted(index, row) for index, row in enumerate(converted)]
        return [*rows, *(_void_row(index, sample) for index, sample in enumerate(void, len(rows)))]
    for sample in voting:
        _check(sample, args)
    rewards = _rewards(voting, args)
    return [
        _row(index, sample, rewards[id(sample)], _routes(sample, args))
        if id(sample) in rewards
        else _void_row(index, sample)
        for index, sample in enumerate(samples)
    ]


def policy_version(sample: Sample) -> int:
    """The oldest weight version that sampled a trained token: 0 for an engine's ``default``, or if unknown.

    Raises:
        DataError: neither a number nor ``default``.
    """
    mask = _mask(sample)
    versions = [
        version
        for version, start, end in sample.metadata.get("weight_version_spans", ())
        if any(mask[start:end])
    ]
    return min((_number(version, sample) for version in versions or sample.weight_versions[:1]), default=0)


def oldest_version(samples: Iterable[Sample]) -> int | None:
    """The oldest weight version behind these samples; None where no engine told one."""
    return min((policy_version(sample) for sample in samples if sample.weight_versions), default=None)


def _number(version: str, sample: Sample) -> int:
    if str(version) == "default":
        return 0
    if not str(version).isdecimal():
        raise DataError(
            f"weight version {version!r} is not a number",
            place=f"sample {sample.index}",
            remedy="set weight_version to the number of the update when weights are pushed",
        )
    return int(version)


def _votes(sample: Sample) -> bool:
    return sample.status not in _VOID and not sample.remove_sample


def _check(sample: Sample, args: Any) -> None:
    _check_text_only(sample)
    vocab_size = vocabulary_size(getattr(args, "hf_checkpoint", None))
    check_trainable(sample, PLACE, vocab_size=vocab_size, needs_log_probs=False)
    reward = checked_reward(sample.reward, source=reward_source(sample, args), sample=sample, args=args)
    check_reward_key(reward, sample=sample, args=args)
    if getattr(args, "use_opd", False) and sample.teacher_log_probs is None and any(_mask(sample)):
        raise DataError(
            f"teacher_log_probs is missing for a response of {sample.response_length} tokens (--use-opd)",
            place=sample_name(sample),
            remedy="--rollout-sample-hook-path slime.rollout.on_policy_distillation.ask_teacher, or your own",
        )


def _rewards(samples: list[Sample], args: Any) -> dict[int, Reward]:
    """What each sample earned, by its identity: as given, or as the user's function shapes it."""
    shaped = shaped_rewards(samples, args)
    if shaped is None:
        shaped = [read_reward(s.get_reward_value(args), place=sample_name(s)) for s in samples]
    for sample, reward in zip(samples, shaped, strict=True):
        check_listed(reward, _mask(sample), place=sample_name(sample))
    return {id(sample): reward for sample, reward in zip(samples, shaped, strict=True)}


def _row(index: int, sample: Sample, reward: Reward, routes: Routes | None = None) -> TrainSample:
    assert sample.rollout_id is not None and sample.group_index is not None
    raw, teacher = sample.metadata.get("raw_reward"), sample.teacher_log_probs
    log_probs = sample.rollout_log_probs
    return TrainSample(
        index=index,
        rollout_id=sample.rollout_id,
        group_index=sample.group_index,
        tokens=tuple(sample.tokens),
        response_length=sample.response_length,
        loss_mask=_mask(sample),
        rollout_log_probs=None if log_probs is None else tuple(log_probs),
        reward=reward,
        policy_version=policy_version(sample),
        raw_reward=None if raw is None else float(raw),
        teacher_log_probs=None if teacher is None else tuple(teacher),
        routed_experts=routes,
    )


def _routes(sample: Sample, args: Any) -> Routes | None:
    """The routes that training replays, in their shape; None where it replays none.

    Raises:
        DataError: they are missing, or not those of this row and model.
    """
    if not getattr(args, "use_rollout_routing_replay", False):
        return None
    routes, shape = sample.rollout_routed_experts, shape_of_folder(getattr(args, "hf_checkpoint", None))
    problem = None
    if shape is None:
        problem = "the model has no experts, so there is nothing to replay"
    elif routes is None:
        problem = "rollout_routed_experts is missing"
    else:
        trained = [i for i, mask in enumerate(_mask(sample), sample.prompt_length) if mask]
        needed = trained[-1] if trained else 0
        if routes.size < needed * shape.layers * shape.top_k:
            problem = (
                f"rollout_routed_experts has {routes.size} numbers, {needed} tokens lead to trained ones"
            )
    if problem is None:
        assert routes is not None and shape is not None
        try:
            return shaped_routes(routes, len(sample.tokens), shape)
        except ValueError as error:
            problem = str(error)
    raise DataError(
        f"{problem} (--use-rollout-routing-replay)",
        place=sample_name(sample),
        remedy="adapters and engine calls of your own need return_routed_experts=True, and an engine that "
        "tells routes; or leave the flag out",
    )


def _converted(index: int, row: ConvertedRow) -> TrainSample:
    for source in row.sources:
        _check_text_only(source)
    version = min(policy_version(source) for source in row.sources)
    return replace(_row(index, row.sample, row.reward), policy_version=version)


def _check_text_only(sample: Sample) -> None:
    for field in ("multimodal_inputs", "multimodal_train_inputs"):
        if getattr(sample, field):
            kinds = ", ".join(getattr(sample, field))
            raise DataError(
                f"{field} holds {kinds}, which the trainers do not take: its tokens alone are another prompt",
                place=sample_name(sample),
                remedy="train on text, or set remove_sample on samples that hold more",
            )


def _void_row(index: int, sample: Sample) -> TrainSample:
    """A row that counts as a rollout and trains nothing; one token of response, whatever it really held."""
    assert sample.rollout_id is not None and sample.group_index is not None
    return TrainSample(
        index=index,
        rollout_id=sample.rollout_id,
        group_index=sample.group_index,
        tokens=(0, 0),
        response_length=1,
        loss_mask=(0,),
        rollout_log_probs=(0.0,),
        reward=math.nan,
        votes=False,
    )


def _mask(sample: Sample) -> tuple[int, ...]:
    return (1,) * sample.response_length if sample.loss_mask is None else tuple(sample.loss_mask)


def _fill_ids(groups: list[list[Any]]) -> None:
    samples = list(flatten(groups))
    fresh_groups = _unused(sample.group_index for sample in samples)
    fresh_rollouts = _unused(sample.rollout_id for sample in samples)
    for group in groups:
        index = next((s.group_index for s in flatten(group) if s.group_index is not None), None)
        index = next(fresh_groups) if index is None else index
        for siblings in rollouts_of(group):
            rollout = siblings[0].rollout_id
            rollout = next(fresh_rollouts) if rollout is None else rollout
            for sample in siblings:
                sample.rollout_id = rollout
                sample.group_index = index if sample.group_index is None else sample.group_index


def _unused(taken: Iterable[int | None]) -> Iterator[int]:
    used = set(taken)
    return (number for number in itertools.count() if number not in used)


def _check_rollout_ids(groups: list[list[Any]]) -> None:
    group_of: dict[int | None, int | None] = {}
    for sample in flatten(groups):
        first = group_of.setdefault(sample.rollout_id, sample.group_index)
        if first != sample.group_index:
            raise DataError(
                f"rollout_id {sample.rollout_id} is in group {first} and in group {sample.group_index}",
                place=PLACE,
                remedy="give every rollout an id of its own, or leave rollout_id unset",
            )

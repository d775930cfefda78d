"""Batches that cannot teach anything are refused by name, instead of moving the weights by nothing.

Invariant: what is refused here has no gradient whatever the model is. Knows rows and advantages; knows no
trainer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from slime.config.training_sections import AlgorithmConfig
from slime.errors import DataError, RolloutFailedError
from slime.train.batch import TrainSample

_PLACE = "rollout function"


def check_trains(samples: Sequence[TrainSample]) -> None:
    """Check that there is a token to train on.

    Raises:
        RolloutFailedError: no sample votes.
        DataError: the loss masks of all that vote are 0; names samples and lengths.
    """
    voting = [sample for sample in samples if sample.votes]
    if not voting:
        rollouts = len({sample.rollout_id for sample in samples})
        raise RolloutFailedError(
            f"no sample can train: all {len(samples)} samples of {rollouts} rollouts failed or were removed",
            place=_PLACE,
            remedy="see the reasons of the failures, and what --rollout-sample-filter-path removes",
        )
    if not any(sample.trained_tokens for sample in voting):
        lengths = _few(
            f"sample {s.index} of rollout {s.rollout_id} has {s.response_length} response tokens"
            for s in voting
        )
        raise DataError(
            f"no token trains: the loss masks of all {len(voting)} samples are 0 ({lengths})",
            place=_PLACE,
            remedy="set loss_mask to 1 on the tokens that the policy sampled",
        )


def check_groups(
    samples: Sequence[TrainSample], advantages: Mapping[int, Sequence[float]], algorithm: AlgorithmConfig
) -> None:
    """Check that rewards are compared with something, where the estimator compares them in groups.

    Raises:
        DataError: every group has one rollout, so that all advantages are 0; names groups and rollouts.
    """
    if any(value for values in advantages.values() for value in values) or _has_another_signal(algorithm):
        return
    groups: dict[int, set[int]] = defaultdict(set)
    for sample in samples:
        if sample.votes:
            groups[sample.group_index].add(sample.rollout_id)
    rewards = {sample.reward for sample in samples if sample.votes}
    if len(rewards) == 1 or any(len(rollouts) > 1 for rollouts in groups.values()):
        return
    alone = _few(f"group {group} has rollout {min(rollouts)}" for group, rollouts in groups.items())
    raise DataError(
        f"every advantage is 0: each of the {len(groups)} groups has one rollout, whose own reward is its "
        f"baseline ({alone})",
        place=_PLACE,
        remedy="give the rollouts of a prompt one group_index, or set --disable-rewards-normalization",
    )


def _has_another_signal(algorithm: AlgorithmConfig) -> bool:
    is_users = algorithm.loss_type == "custom_loss" or algorithm.custom_advantage_function_path
    return bool(is_users or algorithm.entropy_coef or algorithm.use_kl_loss)


def _few(texts: Iterable[str], most: int = 3) -> str:
    listed = list(texts)
    return ", ".join(listed[:most]) + (" ..." if len(listed) > most else "")

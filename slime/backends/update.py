"""One rollout's samples become optimizer steps, on any trainer.

Invariant: advantages, step membership, row weights and the source of the old log-probs are settled here, from
ids, before the trainer packs anything. Knows the `Trainer` interface; knows no backend.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import cast

from slime.backends.base import StepRow, Trainer
from slime.backends.checks import check_groups, check_trains
from slime.backends.critic_update import CriticTraining, train_critic, values_before
from slime.backends.factors import Factors, needs_trainer_log_probs, step_factors
from slime.backends.hooks import NO_HOOKS, TrainHooks
from slime.backends.postprocess import Postprocess
from slime.backends.rollout_data import hooked_inputs
from slime.config.training_sections import AlgorithmConfig
from slime.errors import DataError
from slime.train.advantages import Estimator, TokenAdvantages, TokenInputs, estimator_name, token_advantages
from slime.train.aggregate import Aggregation, row_weights
from slime.train.batch import TrainSample
from slime.train.carry import Carry, Waiting, full_steps, renumbered
from slime.train.kl import kl_type
from slime.train.rewards import sum_sibling_rewards
from slime.train.schedule import split_steps
from slime.train.sequence import mean_log_ratios

_SUMMED = frozenset({"tokens", "computed_tokens", "samples", "rollouts", "skipped_step"})
LogProbs = Mapping[int, tuple[float, ...]]


@dataclass(frozen=True, slots=True)
class RolloutUpdate:
    """What training on a rollout gave: metrics of each step, of the rollout as a whole, and times.

    Attributes:
        steps: of the actor; none while a critic warms up.
        critic_steps: of the critic, where there is one.
        timing: full metric names, e.g. ``perf/train_time``.
        waiting: rows that fill no step, and are to be carried to the next rollout step.
    """

    steps: list[dict[str, float]]
    rollout: dict[str, float]
    critic_steps: list[dict[str, float]] = field(default_factory=list)
    timing: dict[str, float] = field(default_factory=dict)
    waiting: tuple[Waiting, ...] = ()

    def metrics(self) -> dict[str, float]:
        """One value a name: ``train/`` over the steps, ``train/critic-`` the critic's, ``rollout/`` of all.

        Steps are averaged, but maxima stay maxima, counts are summed, and the learning rate is the last one.
        """
        merged = _merged("train/", self.steps) | _merged("train/critic-", self.critic_steps)
        whole = {f"rollout/{name}": value for name, value in self.rollout.items()}
        return merged | whole | self.timing


def train_on_rollouts(
    trainer: Trainer,
    samples: Sequence[TrainSample],
    *,
    algorithm: AlgorithmConfig,
    rollouts_per_step: int,
    hooks: TrainHooks = NO_HOOKS,
    critic: CriticTraining | None = None,
    carry: Carry | None = None,
    policy_version: int = 0,
) -> RolloutUpdate:
    """Train on all samples of a rollout, in steps of `rollouts_per_step` rollouts.

    A critic is asked for its values first, and trained on the returns before the actor. With `carry`, rows
    that waited train first, in full steps; what fills none is in `RolloutUpdate.waiting`.

    Old log-probs are the engine's with ``--use-rollout-logprobs``, and, without ``--use-decoupled-loss``, for
    stale rows: an older policy than the newest of the batch or than `policy_version` sampled them, or they
    waited. Of the others, the first step's reuse their own, and later ones are computed before it.

    Raises:
        RolloutFailedError: no sample votes.
        RewardError, DataError: a sample that cannot be trained, by name; or nothing of the batch can.
        HookError: one of `hooks` raised or broke its contract.
    """
    if algorithm.loss_type == "sft_loss":
        return _train_on_conversations(trainer, samples, algorithm, rollouts_per_step, carry)
    if algorithm.sibling_reward == "sum":
        samples = sum_sibling_rewards(samples)
    check_trains(samples)
    deal = _deal(samples, rollouts_per_step, carry)
    steps, stale = deal.steps, deal.stale(max(policy_version, *(s.policy_version for s in samples)))
    apart = _clipped_apart(stale, algorithm)
    before = _log_probs(trainer, _rows_to_score(deal, apart, algorithm, hooks), reference=False)
    old = _old_log_probs(steps, apart, before, algorithm, hooks)
    reference = _reference_log_probs(trainer, deal.rows, algorithm)
    values = None if critic is None else values_before(critic.critic, _flat(steps))
    inputs = TokenInputs(log_probs=before, ref_log_probs=reference, values=values)
    samples, found = _advantages(samples, inputs, algorithm, hooks)
    deal = deal.with_rows(samples)
    weights = [_weights(step, algorithm) for step in deal.steps]
    rollout = _rollout_metrics(samples, found, deal, stale)
    critic_steps: list[dict[str, float]] = []
    if critic is not None and values is not None:
        critic_steps, explained = train_critic(critic, deal.steps, weights, values=values, found=found)
        rollout |= explained
        if critic.alone:
            return RolloutUpdate(steps=[], rollout=rollout, critic_steps=critic_steps)
    advantages = {index: tuple(values.tolist()) for index, values in found.advantages.items()}
    check_groups(samples, advantages, algorithm)
    advantages |= deal.waited
    metrics = []
    for step, weight in zip(deal.steps, weights, strict=True):
        ratios = _sequence_ratios(trainer, step, old) if _needs_sequence_ratio(algorithm) else {}
        factors, factor_metrics = step_factors(step, {**before, **old}, weight, algorithm, hooks)
        kept = reference if algorithm.use_kl_loss else {}
        rows = _step_rows(step, advantages, old, kept, ratios, stale, weight, factors)
        metrics.append(trainer.step(rows) | factor_metrics)
    waiting = deal.waiting(advantages)
    return RolloutUpdate(steps=metrics, rollout=rollout, critic_steps=critic_steps, waiting=waiting)


@dataclass(frozen=True, slots=True)
class _Deal:
    """The rows of a rollout step, dealt over optimizer steps.

    Attributes:
        rest: rows that fill no step, and wait.
        waited: advantages by index of the rows that waited for this rollout step.
    """

    steps: list[list[TrainSample]]
    rest: list[TrainSample]
    waited: dict[int, tuple[float, ...]]

    @property
    def rows(self) -> list[TrainSample]:
        """All rows."""
        return [*_flat(self.steps), *self.rest]

    def with_rows(self, samples: Sequence[TrainSample]) -> _Deal:
        """The same deal of `samples`, whose masks may be others; rows that waited stay as they are."""
        by_index = {sample.index: sample for sample in samples}

        def renewed(rows: Sequence[TrainSample]) -> list[TrainSample]:
            return [by_index.get(row.index, row) for row in rows]

        return _Deal([renewed(step) for step in self.steps], renewed(self.rest), self.waited)

    def stale(self, newest: int) -> frozenset[int]:
        """Indices of the rows that train now and were sampled by another policy than version `newest`."""
        rows = [sample for sample in _flat(self.steps) if sample.trained_tokens]
        return frozenset(s.index for s in rows if s.policy_version < newest or s.index in self.waited)

    def waiting(self, advantages: LogProbs) -> tuple[Waiting, ...]:
        """The rest, with its advantages."""
        return tuple(Waiting(sample, advantages[sample.index]) for sample in self.rest)


def _deal(samples: Sequence[TrainSample], rollouts_per_step: int, carry: Carry | None) -> _Deal:
    late = [] if carry is None else renumbered(carry.waiting)
    pool = [*(row.sample for row in late), *samples]
    waited = {row.sample.index: row.advantages for row in late}
    if carry is None or carry.is_last:
        return _Deal(split_steps(pool, rollouts_per_step=rollouts_per_step), [], waited)
    steps, rest = full_steps(pool, rollouts_per_step=rollouts_per_step)
    return _Deal(steps, rest, waited)


def _advantages(
    samples: Sequence[TrainSample], inputs: TokenInputs, algorithm: AlgorithmConfig, hooks: TrainHooks
) -> tuple[Sequence[TrainSample], TokenAdvantages]:
    """The estimator's, or the user's; zeros where none are wanted. And the rows, post-processed like them."""
    teacher = {s.index: s.teacher_log_probs for s in samples if s.teacher_log_probs is not None}
    inputs = replace(inputs, teacher_log_probs=teacher)
    if not algorithm.compute_advantages_and_returns:
        inputs = replace(inputs, advantages={s.index: [0.0] * s.response_length for s in samples})
    estimator = _estimator(algorithm)
    if hooks.advantages is not None:
        inputs = hooked_inputs(samples, estimator, inputs, hooks.advantages, hooks.args)
    found = token_advantages(samples, estimator, inputs)
    if hooks.postprocess is None:
        return samples, found
    return Postprocess(hooks.postprocess, hooks.args, hooks.rollout_id)(samples, estimator, inputs, found)


def _reference_log_probs(
    trainer: Trainer, samples: Sequence[TrainSample], algorithm: AlgorithmConfig
) -> LogProbs:
    if not (algorithm.use_kl_loss or algorithm.kl_coef):
        return {}
    return _log_probs(trainer, samples, reference=True)


def _train_on_conversations(
    trainer: Trainer,
    samples: Sequence[TrainSample],
    algorithm: AlgorithmConfig,
    rollouts_per_step: int,
    carry: Carry | None,
) -> RolloutUpdate:
    """Supervised fine-tuning: every trained token has the advantage 1, and the policy is its own old one."""
    check_trains(samples)
    deal = _deal(samples, rollouts_per_step, carry)
    ones = {sample.index: tuple(map(float, sample.loss_mask)) for sample in deal.rows}
    metrics = [
        trainer.step(_step_rows(step, ones, {}, {}, {}, frozenset(), _weights(step, algorithm), {}))
        for step in deal.steps
    ]
    rollout = {
        "steps": float(len(deal.steps)),
        "samples": float(sum(sample.votes for sample in samples)),
        "tokens": float(sum(sample.trained_tokens for sample in samples)),
    }
    return RolloutUpdate(steps=metrics, rollout=rollout, waiting=deal.waiting(ones))


def _weights(step: Sequence[TrainSample], algorithm: AlgorithmConfig) -> dict[int, float]:
    mode = "token" if algorithm.calculate_per_token_loss else cast(Aggregation, algorithm.loss_aggregation)
    return row_weights(step, mode=mode, constant=algorithm.loss_aggregation_tokens)


def _estimator(algorithm: AlgorithmConfig) -> Estimator:
    return Estimator(
        name=estimator_name(algorithm.advantage_estimator),
        normalise_rewards=algorithm.rewards_normalization and not algorithm.gives_final_rewards,
        scale_by_std=algorithm.grpo_std_normalization,
        gamma=algorithm.gamma,
        lambd=algorithm.lambd,
        kl_coef=algorithm.kl_coef,
        kl_type=kl_type(algorithm.kl_loss_type),
        whiten=algorithm.normalize_advantages,
        distillation_coef=algorithm.opd_kl_coef if algorithm.use_opd else 0.0,
    )


def _needs_sequence_ratio(algorithm: AlgorithmConfig) -> bool:
    return algorithm.advantage_estimator == "gspo" or algorithm.use_opsm


def _sequence_ratios(trainer: Trainer, step: Sequence[TrainSample], old: LogProbs) -> dict[int, float]:
    """Each rollout's mean log-ratio at the start of a step, for rollouts that have a given old log-prob."""
    moved = {sample.rollout_id for sample in step if sample.index in old}
    rows = [sample for sample in step if sample.rollout_id in moved]
    current = _log_probs(trainer, rows, reference=False)
    before = {**current, **{sample.index: old[sample.index] for sample in rows if sample.index in old}}
    return mean_log_ratios(rows, current, before)


def _clipped_apart(stale: frozenset[int], algorithm: AlgorithmConfig) -> frozenset[int]:
    """Rows that are clipped around the policy that sampled them, whatever the weights before the step are."""
    return frozenset() if algorithm.use_decoupled_loss else stale


def _rows_to_score(
    deal: _Deal, stale: AbstractSet[int], algorithm: AlgorithmConfig, hooks: TrainHooks
) -> list[TrainSample]:
    """Rows whose log-probs under the weights before the first step are needed."""
    users = (hooks.advantages, hooks.loss, hooks.postprocess)
    has_users = any(hook is not None for hook in users)
    if algorithm.kl_coef or algorithm.use_opd or has_users or needs_trainer_log_probs(algorithm, hooks):
        return deal.rows
    if algorithm.use_rollout_logprobs:
        return []
    return [sample for sample in _flat(deal.steps[1:]) if sample.index not in stale]


def _old_log_probs(
    steps: Sequence[Sequence[TrainSample]],
    stale: AbstractSet[int],
    before: LogProbs,
    algorithm: AlgorithmConfig,
    hooks: TrainHooks,
) -> LogProbs:
    """By sample index; for the user's loss of every row, else only where it is another than the row's own."""
    own = before if hooks.loss is not None else {}
    if algorithm.use_rollout_logprobs:
        needed = {s.index: _recorded(s, "--use-rollout-logprobs needs") for s in _flat(steps)}
        return {**own, **needed}
    older = [sample for sample in _flat(steps) if sample.index in stale]
    recorded = {s.index: _recorded(s, f"a row of older policy {s.policy_version} needs") for s in older}
    later = [s.index for s in _flat(steps[1:]) if s.index not in stale and s.trained_tokens]
    return {**own, **recorded, **{index: before[index] for index in later}}


def _recorded(sample: TrainSample, reason: str) -> tuple[float, ...]:
    if sample.rollout_log_probs is None:
        raise DataError(
            f"it carries no engine log-probs, which {reason}",
            place=f"sample {sample.index}",
            remedy="let the generate hook record them",
        )
    return sample.rollout_log_probs


def _log_probs(trainer: Trainer, samples: Sequence[TrainSample], *, reference: bool) -> LogProbs:
    trained = [sample for sample in samples if sample.trained_tokens]
    if not trained:
        return {}
    values = trainer.log_probs(trained, reference=reference)
    return {sample.index: tuple(row) for sample, row in zip(trained, values, strict=True)}


def _step_rows(
    step: Sequence[TrainSample],
    advantages: LogProbs,
    old: LogProbs,
    reference: LogProbs,
    ratios: Mapping[int, float],
    stale: AbstractSet[int],
    weights: Mapping[int, float],
    factors: Factors,
) -> list[StepRow]:
    return [
        StepRow(
            sample=sample,
            advantages=advantages[sample.index],
            weight=weights[sample.index],
            old_log_probs=old.get(sample.index),
            ref_log_probs=reference.get(sample.index),
            sequence_log_ratio=ratios.get(sample.rollout_id, 0.0),
            correction=factors.get(sample.index),
            stale=sample.index in stale,
        )
        for sample in step
    ]


def _rollout_metrics(
    samples: Sequence[TrainSample], advantages: TokenAdvantages, deal: _Deal, stale: AbstractSet[int]
) -> dict[str, float]:
    voting = [sample for sample in samples if sample.votes]
    values = [_mean_where_trained(sample, advantages.advantages[sample.index]) for sample in voting]
    equal = sum(advantages.zero_std_groups.values())
    return dict(advantages.metrics) | {
        "advantages": statistics.fmean(values),
        "advantages_abs": statistics.fmean(map(abs, values)),
        "groups": float(advantages.groups),
        "zero_std/count": float(equal),
        "zero_std/ratio": equal / advantages.groups,
        "rollouts": float(len(advantages.rollout_rewards)),
        "samples": float(len(values)),
        "samples_without_vote": float(len(samples) - len(values)),
        "tokens": float(sum(sample.trained_tokens for sample in samples)),
        "steps": float(len(deal.steps)),
        "stale_rows": float(len(stale)),
    }


def _mean_where_trained(sample: TrainSample, values: Iterable[float]) -> float:
    kept = [float(value) for value, mask in zip(values, sample.loss_mask, strict=True) if mask]
    return statistics.fmean(kept) if kept else 0.0


def _merged(prefix: str, steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for step in steps for name in step)
    return {prefix + name: _merge(name, [step[name] for step in steps if name in step]) for name in names}


def _merge(name: str, values: Sequence[float]) -> float:
    if name in _SUMMED:
        return sum(values)
    if name == "lr":
        return values[-1]
    return max(values) if name.endswith("_max_diff") else statistics.fmean(values)


def _flat(steps: Sequence[Sequence[TrainSample]]) -> list[TrainSample]:
    return [sample for step in steps for sample in step]

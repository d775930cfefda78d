import math
from dataclasses import replace

import pytest

from slime.backends.update import train_on_rollouts
from slime.config.training_sections import AlgorithmConfig
from slime.errors import DataError, RewardError, RolloutFailedError
from tests.backends.rollouts import cut, group_samples, make_trainer


class Recorder:
    """A trainer that records what it is asked for."""

    def __init__(self):
        self.steps, self.asked = [], []

    def log_probs(self, samples, *, reference=False):
        self.asked.append((reference, [sample.index for sample in samples]))
        return [[-1.0] * sample.response_length for sample in samples]

    def step(self, rows):
        self.steps.append(rows)
        return {"loss": float(len(self.steps)), "lr": 0.1 * len(self.steps), "tokens": 5.0}


def update(samples, size, **algorithm):
    recorder = Recorder()
    config = AlgorithmConfig(**algorithm)
    return recorder, train_on_rollouts(recorder, samples, algorithm=config, rollouts_per_step=size)


def test_one_on_policy_step_reuses_its_own_log_probs():
    recorder, _ = update(group_samples(), 6, use_tis=True)
    assert recorder.asked == []
    assert all(row.old_log_probs is None for row in recorder.steps[0])


def test_later_steps_get_log_probs_from_before_the_first():
    recorder, result = update(group_samples(), 4)
    assert recorder.asked == [(False, [3, 4, 5])]
    assert [len(rows) for rows in recorder.steps] == [3, 3]
    assert all(row.old_log_probs == (-1.0,) * row.sample.response_length for row in recorder.steps[1])
    assert [sum(row.weight * row.sample.trained_tokens for row in rows) for rows in recorder.steps] == [
        pytest.approx(1.0)
    ] * 2
    merged = result.metrics()
    assert (merged["train/loss"], merged["train/lr"], merged["train/tokens"]) == (1.5, 0.2, 10.0)
    assert merged["rollout/steps"] == 2.0


def test_engine_log_probs_are_the_old_ones_where_asked_for():
    recorder, _ = update(group_samples(), 6, use_rollout_logprobs=True)
    assert recorder.asked == []
    assert all(row.old_log_probs == row.sample.rollout_log_probs for row in recorder.steps[0])
    with pytest.raises(DataError, match="sample 0"):
        update([replace(group_samples()[0], rollout_log_probs=None)], 6, use_rollout_logprobs=True)


def test_reference_log_probs_are_computed_once_for_all_steps():
    recorder, _ = update(group_samples(), 3, use_kl_loss=True)
    assert (True, [0, 1, 2, 3, 4, 5]) in recorder.asked
    assert all(row.ref_log_probs is not None for rows in recorder.steps for row in rows)


def test_samples_that_cannot_train_are_errors():
    failed = [replace(sample, votes=False) for sample in group_samples()]
    with pytest.raises(RolloutFailedError, match="no sample"):
        update(failed, 6)
    with pytest.raises(RewardError, match="rollout 0"):
        update([replace(group_samples()[0], reward=float("nan"))], 6)


def test_rollout_metrics_count_groups_without_signal():
    samples = [replace(s, reward=0.5) if s.group_index == 0 else s for s in group_samples()]
    _, result = update([*samples, replace(samples[0], index=9, rollout_id=9, votes=False)], 6)
    assert result.rollout["zero_std/count"] == 1
    assert result.rollout["zero_std/ratio"] == 0.5
    assert result.rollout["samples_without_vote"] == 1


def test_what_the_rollout_side_reports_is_not_reported_again():
    _, result = update([replace(s, reward=0.5) for s in group_samples()], 6)
    assert "raw_reward" not in result.rollout
    assert [name for name in result.rollout if name.startswith("zero_std/count_")] == []


@pytest.mark.parametrize("size", [6, 2])
def test_rows_of_an_older_policy_are_not_taken_for_on_policy(size):
    samples = [replace(s, policy_version=7 if s.index in (1, 4) else 8) for s in group_samples()]
    recorder, result = update(samples, size)
    rows = [row for step in recorder.steps for row in step]
    stale = [row for row in rows if row.sample.index in (1, 4)]
    assert all(row.stale and row.old_log_probs == row.sample.rollout_log_probs for row in stale)
    assert not any(row.stale for row in rows if row not in stale)
    assert all(row.old_log_probs is None for row in recorder.steps[0] if row not in stale)
    assert recorder.asked == ([] if size == 6 else [(False, [2, 3, 5])])
    assert result.metrics()["rollout/stale_rows"] == 2.0
    silent = [replace(s, rollout_log_probs=None) for s in samples]
    with pytest.raises(DataError, match="older policy 7") as caught:
        update(silent, size)
    assert "sample 1" in str(caught.value)


@pytest.mark.parametrize("size", [6, 2])
def test_the_decoupled_loss_clips_rows_of_an_older_policy_around_the_weights_before_the_step(size):
    samples = [replace(s, policy_version=7 if s.index in (1, 4) else 8) for s in group_samples()]
    recorder, result = update(samples, size, use_decoupled_loss=True, use_tis=True)
    rows = [row for step in recorder.steps for row in step]
    assert {row.sample.index for row in rows if row.stale} == {1, 4}
    assert all(row.old_log_probs is None for row in recorder.steps[0])
    assert recorder.asked == ([] if size == 6 else [(False, [2, 3, 4, 5])])
    assert result.metrics()["rollout/stale_rows"] == 2.0


def test_the_decoupled_loss_weighs_an_older_policy_by_the_ratio_to_it(tiny_dir):
    samples = [replace(s, policy_version=0) for s in group_samples()]
    trainer = make_trainer(tiny_dir)
    exact = trainer.log_probs(samples)
    shift = 0.3
    older = [
        replace(s, rollout_log_probs=tuple(value - shift for value in v))
        for s, v in zip(samples, exact, strict=True)
    ]
    found = {}
    for name, flags in {"weighed": {"use_decoupled_loss": True, "use_tis": True}, "clipped": {}}.items():
        algorithm = AlgorithmConfig(**flags)
        result = train_on_rollouts(
            make_trainer(tiny_dir, algorithm=algorithm),
            older,
            algorithm=algorithm,
            rollouts_per_step=6,
            policy_version=1,
        )
        found[name] = result.metrics()
    assert found["weighed"]["train/pg_clipfrac"] == 0.0
    assert found["clipped"]["train/pg_clipfrac"] > 0.2
    assert found["weighed"]["train/tis"] == pytest.approx(math.exp(shift), rel=1e-4)


def test_rows_of_an_older_policy_do_not_count_in_the_gap_to_the_engine(tiny_dir):
    trainer = make_trainer(tiny_dir)
    samples = group_samples()
    exact = trainer.log_probs(samples)
    fresh = [replace(s, rollout_log_probs=tuple(v)) for s, v in zip(samples[1:], exact[1:], strict=True)]
    mixed = [samples[0], *(replace(sample, policy_version=1) for sample in fresh)]
    result = train_on_rollouts(trainer, mixed, algorithm=AlgorithmConfig(), rollouts_per_step=6)
    assert result.steps[0]["train_rollout_logprob_max_diff"] < 1e-5
    assert result.steps[0]["ppo_kl"] != 0.0


def test_the_gap_to_the_engine_is_that_of_the_first_policy_in_every_step(tiny_dir):
    trainer = make_trainer(tiny_dir, lr=0.01)
    samples = group_samples()
    exact = trainer.log_probs(samples)
    samples = [replace(s, rollout_log_probs=tuple(v)) for s, v in zip(samples, exact, strict=True)]
    result = train_on_rollouts(trainer, samples, algorithm=AlgorithmConfig(), rollouts_per_step=2)
    assert all(step["train_rollout_logprob_max_diff"] < 1e-5 for step in result.steps)
    assert result.steps[0]["ppo_kl"] == 0.0
    assert result.steps[2]["ppo_kl"] != 0.0


def test_the_sequence_ratio_is_the_rollouts_and_zero_on_policy():
    recorder, _ = update(group_samples(), 4, advantage_estimator="gspo")
    first, second = recorder.steps
    assert {row.sequence_log_ratio for row in first} == {0.0}
    assert recorder.asked == [(False, [3, 4, 5]), (False, [3, 4, 5])]
    assert {row.sequence_log_ratio for row in second} == {0.0}
    recorder, _ = update(group_samples(), 6, use_opsm=True, use_rollout_logprobs=True)
    for row in recorder.steps[0]:
        trained = [
            value
            for value, mask in zip(row.sample.rollout_log_probs, row.sample.loss_mask, strict=True)
            if mask
        ]
        assert row.sequence_log_ratio == pytest.approx(-1.0 - sum(trained) / len(trained))


def test_parts_of_a_reward_are_summed_where_that_is_declared():
    whole = group_samples()
    parts = [
        replace(row, reward=row.reward / 2) for sample in whole for row in cut(sample, 2, 100 * sample.index)
    ]
    recorder, _ = update(parts, 6, sibling_reward="sum")
    expected, _ = update(whole, 6)
    by_rollout = {row.sample.rollout_id: set(row.advantages) - {0.0} for row in expected.steps[0]}
    for row in recorder.steps[0]:
        assert set(row.advantages) - {0.0} <= by_rollout[row.sample.rollout_id]


def test_a_penalty_in_the_reward_asks_for_both_models_before_the_first_step():
    recorder, result = update(group_samples(), 6, kl_coef=0.1)
    assert sorted(reference for reference, _ in recorder.asked) == [False, True]
    assert all(row.ref_log_probs is None for row in recorder.steps[0])
    assert result.rollout["kl"] == 0.0


def test_supervised_fine_tuning_needs_no_old_log_probs_and_no_rewards():
    samples = [replace(sample, reward=0.0, rollout_log_probs=None) for sample in group_samples()]
    recorder, result = update(samples, 4, loss_type="sft_loss", loss_aggregation="token")
    assert recorder.asked == []
    rows = [row for step in recorder.steps for row in step]
    assert all(row.advantages == tuple(map(float, row.sample.loss_mask)) for row in rows)
    assert all(row.old_log_probs is None for row in rows)
    assert result.rollout["samples"] == 6
    with pytest.raises(RolloutFailedError, match="no sample can train"):
        update([replace(sample, votes=False) for sample in samples], 4, loss_type="sft_loss")

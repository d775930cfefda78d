"""Corrections that look beyond the token, and the hooks for them, on a real model."""

import math
import random
from dataclasses import replace

import pytest
import torch

from slime.backends.factors import step_factors
from slime.backends.hooks import NO_HOOKS
from slime.backends.torch.step import has_gradient
from slime.backends.torch.trainer import policy_loss
from slime.backends.update import train_on_rollouts
from slime.config.training_sections import AlgorithmConfig
from slime.errors import DataError, HookError
from slime.train.aggregate import row_weights
from tests.backends.hooks import divide_by_longest, hooks, sequence_correction
from tests.backends.rollouts import cut, gradients, group_samples, make_trainer, relative_gap
from tests.backends.test_update import Recorder

RULES = [
    {"use_tis": True, "tis_level": "sequence", "tis_clip": 1e9},
    {"use_tis": True, "tis_level": "geometric", "tis_mode": "mask", "tis_clip_low": 0.001, "tis_clip": 0.02},
    {"use_tis": True, "tis_batch_normalize": True},
    {"use_rs": True, "rs_lower_bound": 0.0, "rs_upper_bound": 9.0, "rs_veto_threshold": 0.0104},
    {"use_rs": True, "rs_level": "geometric", "rs_lower_bound": 0.0, "rs_upper_bound": 0.0135},
    {"use_rs": True, "rs_lower_bound": 0.0, "rs_upper_bound": 0.016},
]
HOOKS = [{}, {"tis": sequence_correction}, {"reducer": divide_by_longest}]


def train(folder, samples, algorithm, found=NO_HOOKS, **settings):
    trainer = make_trainer(folder, algorithm=algorithm, **({"micro_batch_size": 64} | settings))
    update = train_on_rollouts(trainer, samples, algorithm=algorithm, rollouts_per_step=100, hooks=found)
    return update.steps[0], gradients(trainer)


def pieces(samples, count=3):
    rows = [row for i, sample in enumerate(samples) for row in cut(sample, count, 100 * i)]
    random.Random(count).shuffle(rows)
    return rows


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_law_3_holds_for_corrections_of_rollouts_and_batches(tiny_dir, rule):
    algorithm = AlgorithmConfig(**rule)
    samples = group_samples()
    _, plain = train(tiny_dir, samples, AlgorithmConfig())
    whole_metrics, whole = train(tiny_dir, samples, algorithm)
    metrics, grads = train(tiny_dir, pieces(samples), algorithm, micro_batch_size=1)
    assert relative_gap(whole, plain) > 1e-3
    assert any(value.abs().max() > 0 for value in whole.values())
    assert relative_gap(grads, whole) < 1e-5
    for name in ("loss", "tis", "tis_clipfrac", "rs_frac"):
        assert metrics.get(name, 0.0) == pytest.approx(whole_metrics.get(name, 0.0), rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("functions", HOOKS, ids=lambda found: "".join(found) or "none")
@pytest.mark.parametrize("per_token", [False, True])
def test_law_3_holds_for_the_users_correction_and_reducer(tiny_dir, functions, per_token):
    algorithm = AlgorithmConfig(calculate_per_token_loss=per_token)
    samples, found = group_samples(), hooks(**functions)
    _, plain = train(tiny_dir, samples, algorithm)
    whole_metrics, whole = train(tiny_dir, samples, algorithm, found)
    metrics, grads = train(tiny_dir, pieces(samples), algorithm, found, micro_batch_size=1)
    assert (relative_gap(whole, plain) > 1e-3) == bool(functions)
    assert relative_gap(grads, whole) < 1e-5
    assert metrics["loss"] == pytest.approx(whole_metrics["loss"], rel=1e-5, abs=1e-6)


def test_a_sequence_weight_is_the_product_of_its_rollouts_ratios(tiny_dir):
    samples = group_samples()
    exact = make_trainer(tiny_dir).log_probs(samples)
    near = [
        replace(s, rollout_log_probs=tuple(v - 0.1 for v in values))
        for s, values in zip(samples, exact, strict=True)
    ]
    metrics, grads = train(tiny_dir, near, AlgorithmConfig(use_tis=True, tis_level="sequence", tis_clip=1e9))
    expected = sum(math.exp(0.1 * s.trained_tokens) for s in samples) / len(samples)
    assert metrics["tis"] == pytest.approx(expected, rel=1e-4)
    _, clipped = train(tiny_dir, near, AlgorithmConfig(use_tis=True, tis_level="sequence", tis_clip=1.0))
    _, plain = train(tiny_dir, near, AlgorithmConfig())
    assert relative_gap(clipped, plain) < 1e-5 < relative_gap(grads, plain)


def test_a_rejected_rollout_trains_nothing_and_keeps_its_share_of_the_denominator(tiny_dir):
    samples = group_samples()
    exact = make_trainer(tiny_dir).log_probs(samples)
    near = [replace(s, rollout_log_probs=tuple(v)) for s, v in zip(samples, exact, strict=True)]
    near[0] = replace(near[0], rollout_log_probs=tuple(v + 3.0 for v in exact[0]))
    algorithm = AlgorithmConfig(use_rs=True, rs_level="geometric")
    metrics, grads = train(tiny_dir, near, algorithm)
    assert metrics["rs_frac"] == pytest.approx(1 / 6)
    silent = [replace(near[0], loss_mask=(0,) * near[0].response_length), *near[1:]]
    assert relative_gap(train(tiny_dir, silent, AlgorithmConfig())[1], grads) < 1e-5


def test_rows_whose_factors_are_all_zero_have_no_gradient():
    algorithm = AlgorithmConfig(use_rs=True, rs_level="sequence", rs_lower_bound=0.9, rs_upper_bound=1.1)
    samples = [replace(s, rollout_log_probs=(-1.0,) * s.response_length) for s in group_samples()]
    samples[0] = replace(samples[0], rollout_log_probs=(-4.0,) * samples[0].response_length)
    recorder = Recorder()
    train_on_rollouts(recorder, samples, algorithm=algorithm, rollouts_per_step=100)
    assert recorder.asked == [(False, [0, 1, 2, 3, 4, 5])]
    rows, loss = recorder.steps[0], policy_loss(algorithm)
    assert all(row.old_log_probs is None for row in rows)
    assert [has_gradient(row, loss) for row in rows] == [False, True, True, True, True, True]
    assert has_gradient(rows[0], policy_loss(replace(algorithm, entropy_coef=0.1)))


def test_stale_rows_are_compared_with_their_own_engine_and_weigh_1():
    samples = [replace(s, policy_version=int(s.index != 1)) for s in group_samples()]
    recorder = Recorder()
    algorithm = AlgorithmConfig(use_tis=True, tis_level="geometric")
    train_on_rollouts(recorder, samples, algorithm=algorithm, rollouts_per_step=100)
    row = next(row for row in recorder.steps[0] if row.sample.index == 1)
    assert row.correction == tuple(map(float, row.sample.loss_mask))


def test_the_users_metrics_are_averaged_like_the_loss():
    samples = group_samples()
    log_probs = {s.index: [-1.0] * s.response_length for s in samples}
    found = hooks(tis=sequence_correction)
    _, metrics = step_factors(samples, log_probs, row_weights(samples), AlgorithmConfig(), found)
    assert set(metrics) == {"my_weight", "my_rows", "my_count"}
    assert metrics["my_count"] == 6
    gaps = [
        sum((-1.0 - v) * m for v, m in zip(s.rollout_log_probs, s.loss_mask, strict=True)) / s.trained_tokens
        for s in samples
    ]
    assert metrics["my_rows"] == pytest.approx(sum(gaps) / 6)


def test_a_reducer_that_is_the_mean_over_rollouts_changes_nothing():
    def mean(total_lengths, response_lengths, masks, per_token):
        return lambda x: sum(part.mean() for part in torch.split(x, response_lengths))

    samples = group_samples()
    factors, _ = step_factors(samples, {}, row_weights(samples), AlgorithmConfig(), hooks(reducer=mean))
    for sample in samples:
        assert factors[sample.index] == pytest.approx(sample.loss_mask)


def broken(**changes):
    def hook(args, *, pg_loss, loss_masks, **kwargs):
        answer = {"loss": pg_loss, "masks": loss_masks, "metrics": {}} | {
            name: change(pg_loss, loss_masks) for name, change in changes.items()
        }
        return answer["loss"], answer["masks"], answer["metrics"]

    return hook


def raises(args, **kwargs):
    raise KeyError("weights")


@pytest.mark.parametrize(
    ("functions", "message"),
    [
        ({"tis": raises}, "raised KeyError: 'weights'"),
        ({"tis": lambda args, **kwargs: kwargs["pg_loss"]}, r"returned Tensor, expected \(pg_loss, masks"),
        (
            {"tis": broken(loss=lambda x, m: x[1:])},
            r"pg_loss of shape \(\d+,\), expected \(\d+,\): rollout 0 ... rollout 5 of \[",
        ),
        ({"tis": broken(loss=lambda x, m: x / 0)}, r"pg_loss of rollout 0 \(\d tokens\) are not all finite"),
        ({"tis": broken(loss=lambda x, m: "loss")}, "pg_loss is 'loss', expected a tensor"),
        ({"tis": broken(masks=lambda x, m: m[1:])}, "masks must be a list of 6, one for each of rollout 0"),
        (
            {"tis": broken(masks=lambda x, m: [*m[:2], m[2][1:], *m[3:]])},
            r"masks of rollout 2 has shape \(\d,\), expected \(\d,\)",
        ),
        ({"tis": broken(loss=lambda x, m: x.square())}, "not linear in the loss"),
        ({"tis": broken(metrics=lambda x, m: {"a": x[1:]})}, r"metric 'a' has shape \(\d+,\)"),
        ({"reducer": lambda a, b, c, d: 3.0}, "returned float, expected a function of the loss"),
        ({"reducer": lambda a, b, c, d: lambda x: x}, r"returned \(\d+,\), expected one number"),
        ({"reducer": lambda a, b, c, d: lambda x: 1.0}, "returned float, expected one number"),
        ({"reducer": lambda a, b, c, d: lambda x: x.square().sum()}, "not linear in the loss"),
        ({"reducer": lambda a, b, c, d: lambda x: x.sum() * math.inf}, "rollout 0 .* not all finite"),
    ],
)
def test_a_hook_that_breaks_its_contract_is_named(functions, message):
    samples = group_samples()
    log_probs = {s.index: [-1.0] * s.response_length for s in samples}
    with pytest.raises(HookError, match=message) as caught:
        step_factors(samples, log_probs, row_weights(samples), AlgorithmConfig(), hooks(**functions))
    assert "-function-path (tests." in str(caught.value)


def test_missing_engine_log_probs_name_rollout_and_sample():
    silent = [replace(s, rollout_log_probs=None) for s in group_samples()]
    for choice, found in (
        (AlgorithmConfig(use_tis=True, tis_level="sequence"), NO_HOOKS),
        (AlgorithmConfig(), hooks(tis=sequence_correction)),
    ):
        with pytest.raises(DataError, match="rollout 0, sample 0: engine log-probs are missing"):
            train_on_rollouts(Recorder(), silent, algorithm=choice, rollouts_per_step=9, hooks=found)

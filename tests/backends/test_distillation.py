"""On-policy distillation through the trainer."""

import random
from dataclasses import replace

import pytest

from slime.backends.update import train_on_rollouts
from slime.config.training_sections import AlgorithmConfig
from slime.errors import DataError
from tests.backends.rollouts import cut as cut_rows
from tests.backends.rollouts import gradients, group_samples, make_trainer, relative_gap
from tests.backends.test_update import Recorder

OPD = AlgorithmConfig(use_opd=True, opd_kl_coef=0.5)


def taught():
    """Rollouts that a teacher scored, each token differently."""
    return [
        replace(
            s, teacher_log_probs=tuple(-2.0 - 0.3 * ((k + s.index) % 4) for k in range(s.response_length))
        )
        for s in group_samples()
    ]


def cut(sample, pieces, first_index):
    rows, start = cut_rows(sample, pieces, first_index), 0
    for k, row in enumerate(rows):
        stop = start + row.response_length
        rows[k], start = replace(row, teacher_log_probs=sample.teacher_log_probs[start:stop]), stop
    return rows


def train(folder, samples, algorithm=OPD, **settings):
    trainer = make_trainer(folder, algorithm=algorithm, **({"micro_batch_size": 64} | settings))
    update = train_on_rollouts(trainer, samples, algorithm=algorithm, rollouts_per_step=100)
    return update, gradients(trainer)


def test_law_3_holds_for_distillation(tiny_dir):
    samples = taught()
    rows = [row for i, sample in enumerate(samples) for row in cut(sample, 3, 100 * i)]
    random.Random(3).shuffle(rows)
    update, whole = train(tiny_dir, samples)
    cut_update, grads = train(tiny_dir, rows, micro_batch_size=1)
    assert relative_gap(grads, whole) < 1e-5
    assert relative_gap(whole, train(tiny_dir, samples, AlgorithmConfig())[1]) > 1e-3
    assert cut_update.rollout["opd_reverse_kl"] == pytest.approx(update.rollout["opd_reverse_kl"], rel=1e-5)


def test_the_advantage_is_less_the_log_ratio_to_the_teacher():
    samples = [replace(s, reward=1.0) for s in taught()]
    recorder = Recorder()
    train_on_rollouts(recorder, samples, algorithm=OPD, rollouts_per_step=100)
    for row in recorder.steps[0]:
        expected = [
            -0.5 * (-1.0 - value) * mask
            for value, mask in zip(row.sample.teacher_log_probs, row.sample.loss_mask, strict=True)
        ]
        assert row.advantages == pytest.approx(expected)


def test_a_student_that_is_its_teacher_learns_nothing(tiny_dir):
    trainer = make_trainer(tiny_dir, algorithm=OPD)
    samples = [
        replace(s, reward=1.0, teacher_log_probs=tuple(values))
        for s, values in zip(group_samples(), trainer.log_probs(group_samples()), strict=True)
    ]
    update, grads = train(tiny_dir, samples)
    assert all(value.abs().max() < 1e-5 for value in grads.values())
    assert abs(update.rollout["opd_reverse_kl"]) < 1e-6


def test_a_row_without_scores_is_named():
    samples = taught()
    samples[4] = replace(samples[4], teacher_log_probs=None)
    with pytest.raises(DataError, match=r"rollout 4, sample 4: teacher_log_probs are missing; .* \d tokens"):
        train_on_rollouts(Recorder(), samples, algorithm=OPD, rollouts_per_step=100)

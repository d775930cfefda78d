"""``--incomplete-step carry`` through the trainer."""

import random
from dataclasses import replace

import pytest
import torch

from slime.backends.update import train_on_rollouts
from slime.config.training_sections import AlgorithmConfig
from slime.errors import DataError
from slime.train.carry import Carry
from tests.backends.rollouts import cut, gradients, group_samples, make_trainer, relative_gap
from tests.backends.test_update import Recorder


def rollout_step(number):
    """Six rollouts of one rollout step; every step counts its ids from 0."""
    return [replace(s, policy_version=number) for s in group_samples(seed=number)]


def run(trainer, count, *, size=4, algorithm=None, rows=rollout_step):
    """Some rollout steps; returns what each gave."""
    updates, waiting = [], ()
    for number in range(count):
        update = train_on_rollouts(
            trainer,
            rows(number),
            algorithm=algorithm or AlgorithmConfig(),
            rollouts_per_step=size,
            carry=Carry(waiting=waiting, is_last=number + 1 == count),
        )
        updates.append(update)
        waiting = update.waiting
    return updates


@pytest.mark.parametrize(
    ("size", "sizes"), [(4, [4, 4, 4, 3, 3]), (6, [6, 6, 6]), (20, [18]), (7, [7, 6, 5])]
)
@pytest.mark.parametrize("loss_type", ["policy_loss", "sft_loss"])
def test_every_rollout_trains_once_and_only_the_last_step_is_not_full(size, sizes, loss_type):
    recorder = Recorder()
    updates = run(recorder, 3, size=size, algorithm=AlgorithmConfig(loss_type=loss_type))
    found = [len({row.sample.rollout_id for row in step}) for step in recorder.steps]
    assert sorted(found, reverse=True) == sorted(sizes, reverse=True)
    trained = sorted(row.sample.tokens for step in recorder.steps for row in step)
    assert trained == sorted(s.tokens for number in range(3) for s in rollout_step(number))
    assert updates[-1].waiting == ()
    for step in recorder.steps:
        weights = sum(row.weight * row.sample.trained_tokens for row in step)
        assert weights == pytest.approx(1.0)


def test_what_waits_keeps_the_advantages_of_its_whole_group_and_the_engines_log_probs():
    recorder, plain = Recorder(), Recorder()
    run(recorder, 2, size=4)
    train_on_rollouts(plain, rollout_step(0), algorithm=AlgorithmConfig(), rollouts_per_step=100)
    expected = {row.sample.tokens: row.advantages for row in plain.steps[0]}
    late = [row for step in recorder.steps[1:] for row in step if row.sample.rollout_id < 0]
    assert len(late) == 2
    for row in late:
        assert row.advantages == expected[row.sample.tokens]
        assert row.stale and row.old_log_probs == row.sample.rollout_log_probs


def test_a_step_that_is_not_full_moves_nothing(tiny_dir):
    trainer = make_trainer(tiny_dir)
    before = {name: weight.clone() for name, weight in trainer.weights()}
    update = train_on_rollouts(
        trainer, rollout_step(0), algorithm=AlgorithmConfig(), rollouts_per_step=7, carry=Carry()
    )
    assert update.steps == [] and len(update.waiting) == 6
    assert update.rollout["steps"] == 0.0
    assert all(torch.equal(weight, before[name]) for name, weight in trainer.weights())


def test_law_3_holds_for_what_was_carried(tiny_dir):
    def pieces(number):
        rows = [row for i, s in enumerate(rollout_step(number)) for row in cut(s, 3, 100 * i)]
        return random.Random(number).sample(rows, len(rows))

    algorithm = AlgorithmConfig(advantage_estimator="gspo", normalize_advantages=True)
    whole = make_trainer(tiny_dir, algorithm=algorithm, micro_batch_size=64, adam_eps=1e-3)
    updates = run(whole, 2, algorithm=algorithm)
    other = make_trainer(tiny_dir, algorithm=algorithm, micro_batch_size=1, adam_eps=1e-3)
    cut_updates = run(other, 2, algorithm=algorithm, rows=pieces)
    assert relative_gap(gradients(other), gradients(whole)) < 1e-4
    for ours, theirs in zip(cut_updates, updates, strict=True):
        assert [s["loss"] for s in ours.steps] == pytest.approx([s["loss"] for s in theirs.steps], abs=1e-5)


def test_a_row_that_waited_without_engine_log_probs_is_named():
    def silent(number):
        return [replace(s, rollout_log_probs=None) for s in rollout_step(number)]

    with pytest.raises(DataError, match="carries no engine log-probs"):
        run(Recorder(), 2, rows=silent)

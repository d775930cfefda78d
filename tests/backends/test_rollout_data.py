"""The user's advantage function, through the trainer."""

import math
import random
from dataclasses import replace

import pytest
import torch

from slime.backends.update import train_on_rollouts
from slime.config.training_sections import AlgorithmConfig
from slime.errors import HookError
from tests.backends.hooks import hooks, rewards_and_kl
from tests.backends.rollouts import cut, gradients, group_samples, make_trainer, relative_gap
from tests.backends.test_update import Recorder


def seen(samples, answer=rewards_and_kl, **algorithm):
    """What the function was given, and the rows that its answer became."""
    given = {}

    def hook(args, rollout_data):
        answer(args, rollout_data)
        given.update(rollout_data)

    recorder = Recorder()
    train_on_rollouts(
        recorder,
        samples,
        algorithm=AlgorithmConfig(**algorithm),
        rollouts_per_step=100,
        hooks=hooks(advantages=hook),
    )
    return given, recorder.steps[0]


def train(folder, samples, **settings):
    algorithm = AlgorithmConfig(kl_coef=0.1)
    trainer = make_trainer(folder, algorithm=algorithm, **({"micro_batch_size": 64} | settings))
    train_on_rollouts(
        trainer, samples, algorithm=algorithm, rollouts_per_step=100, hooks=hooks(advantages=rewards_and_kl)
    )
    return gradients(trainer)


def test_law_3_holds_for_the_users_advantages(tiny_dir):
    samples = group_samples()
    rows = [row for i, sample in enumerate(samples) for row in cut(sample, 3, 100 * i)]
    random.Random(3).shuffle(rows)
    whole = train(tiny_dir, samples)
    assert relative_gap(train(tiny_dir, rows, micro_batch_size=1), whole) < 1e-5


def test_the_function_sees_every_row_that_trains_with_its_ids():
    samples = group_samples()
    failed = replace(samples[0], index=90, rollout_id=90, reward=math.nan, votes=False)
    given, rows = seen([failed, *reversed(samples)], kl_coef=0.5)
    assert given["sample_indices"] == given["rollout_ids"] == [0, 1, 2, 3, 4, 5]
    assert given["group_indices"] == [0, 0, 0, 1, 1, 1]
    assert given["raw_reward"] == [sample.reward for sample in samples]
    assert [len(row) for row in given["kl"]] == given["response_lengths"]
    assert sum(given["rewards"][:3]) == pytest.approx(0.0)
    expected = [
        torch.where(m > 0, a, 0.0) for m, a in zip(given["loss_masks"], given["advantages"], strict=True)
    ]
    for row, values in zip(sorted(rows, key=lambda r: r.sample.index), expected, strict=True):
        assert row.advantages == pytest.approx(values.tolist())


def test_rewards_of_equal_groups_are_exactly_zero_and_the_raw_ones_are_those_before_shaping():
    samples = [replace(s, reward=0.3, raw_reward=5.0) for s in group_samples()]
    given, _ = seen(samples)
    assert given["rewards"] == [0.0] * 6
    assert given["raw_reward"] == [5.0] * 6


def test_a_critic_needs_returns_of_the_function():
    with pytest.raises(HookError, match="which the critic learns from"):
        seen(group_samples(), sets(returns=lambda rows: None), advantage_estimator="ppo")


def sets(**values):
    def hook(args, rollout_data):
        rewards_and_kl(args, rollout_data)
        for name, change in values.items():
            rollout_data[name] = change(rollout_data[name])

    return hook


@pytest.mark.parametrize(
    ("hook", "message"),
    [
        (lambda args, rollout_data: None, "did not set rollout_data"),
        (sets(advantages=lambda rows: rows[1:]), "advantages must be a list of 6, one for each of sample 0"),
        (
            sets(advantages=lambda rows: [rows[0], rows[1][1:], *rows[2:]]),
            r"advantages of sample 1 of rollout 1 has shape \(\d,\), expected \(\d,\)",
        ),
        (
            sets(advantages=lambda rows: [*rows[:5], rows[5] * math.nan]),
            r"advantages of sample 5 of rollout 5 \(\d tokens\) are not all finite",
        ),
        (
            sets(returns=lambda rows: [rows[0][:, None], *rows[1:]]),
            "returns of sample 0 of rollout 0 has shape",
        ),
        (lambda args, rollout_data: rollout_data["nothing"], "raised KeyError: 'nothing'"),
    ],
)
def test_a_function_that_breaks_its_contract_is_named(hook, message):
    with pytest.raises(HookError, match=message) as caught:
        train_on_rollouts(
            Recorder(),
            group_samples(),
            algorithm=AlgorithmConfig(),
            rollouts_per_step=100,
            hooks=hooks(advantages=hook),
        )
    assert "--custom-advantage-function-path (tests.advantages)" in str(caught.value)

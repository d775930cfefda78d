"""Rewards a turn, a token and a segment, through the trainer."""

import random
from dataclasses import replace

import pytest

from slime.config.training_sections import AlgorithmConfig
from slime.train.batch import TokenRewards, TurnRewards
from slime.train.rewards import turn_ends
from tests.backends.rollouts import cut, group_samples, relative_gap
from tests.backends.test_laws import train


def with_token_rewards(samples):
    return [
        replace(
            s, reward=TokenRewards(tuple(m * 0.3 * ((k + s.index) % 3) for k, m in enumerate(s.loss_mask)))
        )
        for s in samples
    ]


def cut_rewards(sample, pieces, first_index):
    """`cut`, where each piece carries the rewards of its own tokens."""
    rows, start = cut(sample, pieces, first_index), 0
    for k, row in enumerate(rows):
        values = sample.reward.values[start : start + row.response_length]
        rows[k], start = replace(row, reward=TokenRewards(values)), start + row.response_length
    return rows


@pytest.mark.parametrize("estimator", ["grpo", "gspo", "rloo", "reinforce_plus_plus"])
def test_law_3_holds_for_rewards_a_token(tiny_dir, estimator):
    algorithm = AlgorithmConfig(advantage_estimator=estimator)
    samples = with_token_rewards(group_samples())
    rows = [row for i, sample in enumerate(samples) for row in cut_rewards(sample, 3, 100 * i)]
    random.Random(3).shuffle(rows)
    _, plain = train(tiny_dir, group_samples(), algorithm)
    _, whole = train(tiny_dir, samples, algorithm)
    _, grads = train(tiny_dir, rows, algorithm, micro_batch_size=1)
    assert relative_gap(whole, plain) > 1e-3
    assert relative_gap(grads, whole) < 1e-5


def test_a_reward_a_turn_is_a_reward_at_the_last_token_of_it(tiny_dir):
    by_turn, by_token = [], []
    for sample in group_samples():
        ends = turn_ends(sample.loss_mask)
        values = [0.5 * ((k + sample.index) % 3) for k in range(len(ends))]
        placed = dict(zip(ends, values, strict=True))
        by_turn.append(replace(sample, reward=TurnRewards(tuple(values))))
        tokens = tuple(placed.get(k, 0.0) for k in range(sample.response_length))
        by_token.append(replace(sample, reward=TokenRewards(tokens)))
    _, grads = train(tiny_dir, by_turn)
    assert relative_gap(grads, train(tiny_dir, by_token)[1]) < 1e-6


def test_credit_per_segment_stays_with_its_rows_however_they_are_cut_again(tiny_dir):
    def segments(sample):
        rows = cut(sample, 2, 100 * sample.index)
        return [replace(row, reward=sample.reward + 0.5 * k) for k, row in enumerate(rows)]

    whole = [row for sample in group_samples() for row in segments(sample)]
    again = [piece for i, row in enumerate(whole) for piece in cut(row, 2, 1000 * i)]
    random.Random(1).shuffle(again)
    _, grads = train(tiny_dir, whole)
    assert relative_gap(train(tiny_dir, again, micro_batch_size=1)[1], grads) < 1e-5
    _, plain = train(tiny_dir, group_samples())
    assert relative_gap(grads, plain) > 1e-3


def test_rewards_that_a_function_shaped_are_not_normalised_again(tiny_dir):
    algorithm = AlgorithmConfig(custom_reward_post_process_path="my.function")
    raw = AlgorithmConfig(rewards_normalization=False)
    _, grads = train(tiny_dir, group_samples(), algorithm)
    assert relative_gap(grads, train(tiny_dir, group_samples(), raw)[1]) == 0.0

"""The user's post-processing of a rollout step, through the trainer."""

import math
import random
from dataclasses import replace

import pytest
import torch

from slime.backends.critic_update import CriticTraining
from slime.backends.update import train_on_rollouts
from slime.config.training_sections import AlgorithmConfig
from slime.errors import HookError
from slime.train.batch import TokenRewards
from slime.train.carry import Carry
from tests.backends.hooks import hooks, rewards_and_kl
from tests.backends.rollouts import cut, gradients, group_samples, make_trainer, relative_gap
from tests.backends.test_update import Recorder


def steps(samples, hook=None, *, rollouts_per_step=100, carry=None, critic=None, others=None, **algorithm):
    recorder = Recorder()
    users = {} if hook is None else {"postprocess": hook}
    update = train_on_rollouts(
        recorder,
        samples,
        algorithm=AlgorithmConfig(**algorithm),
        rollouts_per_step=rollouts_per_step,
        hooks=replace(hooks(**users, **(others or {})), rollout_id=7),
        carry=carry,
        critic=critic,
    )
    return update, recorder.steps


def last_token_out(args, rollout_id, rollout_data):
    """The last trained token of each rollout does not train."""
    last = {}
    for row, (rollout, mask) in enumerate(
        zip(rollout_data["rollout_ids"], rollout_data["loss_masks"], strict=True)
    ):
        last[rollout] = (row, int(mask.nonzero().max()))
    for row, token in last.values():
        rollout_data["loss_masks"][row][token] = 0


def halved(args, rollout_id, rollout_data):
    rollout_data["advantages"] = [0.5 * row for row in rollout_data["advantages"]]


def test_a_hook_that_changes_nothing_changes_nothing():
    _, plain = steps(group_samples(), kl_coef=0.5)
    _, hooked = steps(group_samples(), lambda args, rollout_id, rollout_data: None, kl_coef=0.5)
    assert hooked == plain


def test_it_sees_the_step_and_the_rows_with_their_advantages():
    given = {}

    def hook(args, rollout_id, rollout_data):
        given.update(rollout_data, id=rollout_id, key=args.my_key)
        return rollout_data

    _, (rows,) = steps(group_samples(), hook, use_kl_loss=True)
    assert (given["id"], given["key"]) == (7, 3.0)
    assert given["sample_indices"] == [0, 1, 2, 3, 4, 5]
    assert {"log_probs", "ref_log_probs", "rollout_log_probs", "loss_masks", "kl"} <= set(given)
    assert "returns" not in given
    assert [tuple(row.tolist()) for row in given["advantages"]] == [row.advantages for row in rows]


@pytest.mark.parametrize("in_place", [True, False])
def test_changed_advantages_are_trained_on(in_place):
    def hook(args, rollout_id, rollout_data):
        for row in rollout_data["advantages"]:
            row *= 0.5

    _, (plain,) = steps(group_samples())
    update, (found,) = steps(group_samples(), hook if in_place else halved)
    for before, after in zip(plain, found, strict=True):
        assert after.advantages == pytest.approx([value / 2 for value in before.advantages])
    assert update.rollout["advantages_abs"] > 0


def test_it_comes_after_the_users_advantages():
    _, (plain,) = steps(group_samples(), others={"advantages": rewards_and_kl})
    _, (found,) = steps(group_samples(), halved, others={"advantages": rewards_and_kl})
    assert [row.advantages for row in found] == [tuple(v / 2 for v in row.advantages) for row in plain]


def test_law_3_weights_are_those_of_the_changed_masks():
    update, (rows,) = steps(group_samples(), last_token_out)
    assert update.rollout["tokens"] == sum(s.trained_tokens - 1 for s in group_samples())
    for row, sample in zip(rows, group_samples(), strict=True):
        assert row.sample.trained_tokens == sample.trained_tokens - 1
        assert row.weight == pytest.approx(1 / (6 * row.sample.trained_tokens))
        assert all(a == 0 for a, m in zip(row.advantages, row.sample.loss_mask, strict=True) if not m)


def test_law_3_holds_for_what_it_changes(tiny_dir):
    def train(samples, micro_batch_size):
        trainer = make_trainer(tiny_dir, micro_batch_size=micro_batch_size)
        users = hooks(postprocess=last_token_out)
        algorithm = AlgorithmConfig()
        train_on_rollouts(trainer, samples, algorithm=algorithm, rollouts_per_step=100, hooks=users)
        return gradients(trainer)

    samples = group_samples()
    rows = [row for i, sample in enumerate(samples) for row in cut(sample, 3, 100 * i)]
    random.Random(3).shuffle(rows)
    whole = train(samples, 64)
    assert relative_gap(train(rows, 1), whole) < 1e-5
    assert relative_gap(whole, gradients_without_hook(tiny_dir, samples)) > 1e-3


def gradients_without_hook(folder, samples):
    trainer = make_trainer(folder, micro_batch_size=64)
    train_on_rollouts(trainer, samples, algorithm=AlgorithmConfig(), rollouts_per_step=100)
    return gradients(trainer)


def test_a_step_whose_rollouts_are_all_taken_out_moves_nothing(tiny_dir):
    def hook(args, rollout_id, rollout_data):
        for rollout, mask in zip(rollout_data["rollout_ids"], rollout_data["loss_masks"], strict=True):
            mask *= int(rollout < 3)

    trainer = make_trainer(tiny_dir, micro_batch_size=64)
    update = train_on_rollouts(
        trainer,
        group_samples(),
        algorithm=AlgorithmConfig(),
        rollouts_per_step=3,
        hooks=hooks(postprocess=hook),
    )
    assert [step["tokens"] > 0 for step in update.steps] == [True, False]
    assert all(not gradient.any() for gradient in gradients(trainer).values())


def test_rows_that_wait_were_post_processed_once_with_their_group():
    calls = []

    def hook(args, rollout_id, rollout_data):
        calls.append(rollout_data["sample_indices"])
        last_token_out(args, rollout_id, rollout_data)
        halved(args, rollout_id, rollout_data)

    samples = group_samples()
    _, (plain,) = steps(samples)
    first, _ = steps(samples, hook, rollouts_per_step=4, carry=Carry())
    assert [row.sample.trained_tokens for row in first.waiting] == [s.trained_tokens - 1 for s in samples[4:]]
    later = [replace(s, index=s.index + 20, rollout_id=s.rollout_id + 20) for s in samples]
    carry = Carry(waiting=first.waiting, is_last=True)
    _, (second,) = steps(later, hook, carry=carry)
    late = [row for row in second if row.sample.index < 0]
    assert [len(row.advantages) for row in late] == [s.response_length for s in samples[4:]]
    for row, before in zip(late, plain[4:], strict=True):
        expected = [m * a / 2 for m, a in zip(row.sample.loss_mask, before.advantages, strict=True)]
        assert row.advantages == pytest.approx(expected)
    assert calls == [[0, 1, 2, 3, 4, 5], [20, 21, 22, 23, 24, 25]]


def test_a_reward_on_a_token_that_is_taken_out_stays_a_reward_of_the_rollout():
    samples = [
        replace(s, reward=TokenRewards((*(0.0,) * (s.response_length - 1), s.reward * s.loss_mask[-1])))
        for s in group_samples()
    ]
    _, (rows,) = steps(samples, last_token_out)
    assert any(any(row.advantages) for row in rows)


class RecordingCritic:
    """A critic that records the returns that it is to learn."""

    def __init__(self):
        self.rows = []

    def values(self, samples):
        return [[0.25] * sample.response_length for sample in samples]

    def step(self, rows):
        self.rows += rows
        return {"value_loss": 0.0}

    def sleep(self):
        """Nothing to give back."""


def test_a_critic_learns_the_changed_returns():
    critic = RecordingCritic()
    given = {}

    def hook(args, rollout_id, rollout_data):
        given.update(rollout_data)
        rollout_data["returns"] = [row + 1 for row in rollout_data["returns"]]
        last_token_out(args, rollout_id, rollout_data)

    steps(group_samples(), hook, advantage_estimator="ppo", critic=CriticTraining(critic=critic))
    assert "values" in given
    for row, before in zip(critic.rows, given["returns"], strict=True):
        expected = [(value + 1) * m for value, m in zip(before.tolist(), row.sample.loss_mask, strict=True)]
        assert row.returns == pytest.approx(expected)


def sets(**changes):
    def hook(args, rollout_id, rollout_data):
        for name, change in changes.items():
            rollout_data[name] = change(rollout_data.get(name))

    return hook


def first(value):
    return lambda rows: [value(rows[0]), *rows[1:]]


def raised(mask):
    """Set where it is 0 to 1."""
    return torch.ones_like(mask)


@pytest.mark.parametrize(
    ("hook", "message"),
    [
        (lambda args, rollout_id, rollout_data: [1], "returned list, which nobody reads"),
        (lambda args, rollout_id, rollout_data: rollout_data["no"], "raised KeyError: 'no'"),
        (sets(loss_mask=lambda rows: []), "added loss_mask, and training does not read that"),
        (sets(returns=lambda rows: []), "added returns"),
        (lambda args, rollout_id, rollout_data: rollout_data.pop("kl") and None, "removed kl"),
        (sets(advantages=lambda rows: rows[1:]), "advantages must be a list of 6, one for each of sample 0"),
        (
            sets(advantages=first(lambda row: row[1:])),
            r"advantages of sample 0 of rollout 0 has shape \(\d,\), expected \(\d,\)",
        ),
        (
            sets(advantages=first(lambda row: row * math.nan)),
            r"advantages of sample 0 of rollout 0 \(\d tokens\) are not all finite",
        ),
        (sets(loss_masks=first(lambda row: row[1:])), "loss_masks of sample 0 of rollout 0 has shape"),
        (
            sets(loss_masks=first(lambda row: row * 0.5)),
            r"loss_masks of sample 0 of rollout 0 is 0.5 at token 0 of \d, expected 0 or 1",
        ),
        (
            sets(loss_masks=first(raised)),
            r"loss_masks of sample 0 of rollout 0 is 1 at token 1 of \d, which was 0: the policy did not",
        ),
        (sets(loss_masks=lambda rows: [0 * row for row in rows]), "left no token to train on: .* all 6 rows"),
        (
            sets(tokens=first(lambda row: row + 1)),
            r"changed tokens of sample 0 of rollout 0 \(\d tokens\), which must stay",
        ),
        (sets(rewards=first(lambda value: value + 1)), "changed rewards of sample 0 of rollout 0"),
        (sets(rollout_ids=first(lambda value: value + 1)), "changed rollout_ids of sample 0 of rollout 0"),
        (sets(log_probs=lambda rows: rows[1:]), "changed log_probs from a list of 6 rows to 5"),
        (sets(kl=lambda rows: None), "changed kl from a list of 6 rows to NoneType"),
    ],
)
def test_a_hook_that_breaks_its_contract_is_named(hook, message):
    with pytest.raises(HookError, match=message) as caught:
        steps(group_samples(), hook)
    assert "--rollout-data-postprocess-path (tests.postprocess)" in str(caught.value)

"""The user's own loss, through the trainer."""

import math
import random

import pytest
import torch
from transformers import AutoModelForCausalLM

from slime.backends.update import train_on_rollouts
from slime.config.training_sections import AlgorithmConfig
from slime.errors import HookError
from tests.backends.hooks import hooks, ppo
from tests.backends.rollouts import cut, gradients, group_samples, make_trainer, relative_gap
from tests.backends.test_laws import train as train_built_in
from tests.backends.test_update import Recorder

CUSTOM = AlgorithmConfig(loss_type="custom_loss", custom_loss_function_path="my.loss")


def train(folder, samples, hook=ppo, algorithm=CUSTOM, size=100, **settings):
    settings = {"micro_batch_size": 64} | settings
    trainer = make_trainer(folder, algorithm=algorithm, hooks=hooks(loss=hook), **settings)
    update = train_on_rollouts(
        trainer, samples, algorithm=algorithm, rollouts_per_step=size, hooks=hooks(loss=hook)
    )
    return update.steps, gradients(trainer)


@pytest.mark.parametrize("aggregation", ["rollout", "token", "sample", "prompt"])
def test_the_built_in_loss_written_as_a_hook_is_the_same(tiny_dir, aggregation):
    samples = group_samples()
    algorithm = AlgorithmConfig(
        loss_type="custom_loss", custom_loss_function_path="x", loss_aggregation=aggregation
    )
    steps, grads = train(tiny_dir, samples, algorithm=algorithm, tree_batches="off")
    metrics, expected = train_built_in(tiny_dir, samples, AlgorithmConfig(loss_aggregation=aggregation))
    assert relative_gap(grads, expected) < 1e-5
    assert steps[0]["loss"] == pytest.approx(metrics["loss"], abs=1e-6)
    assert steps[0]["my_ratio"] == pytest.approx(1.0, rel=1e-5)
    assert steps[0]["tokens"] == metrics["tokens"]


@pytest.mark.parametrize(
    "settings",
    [
        {"micro_batch_size": 1},
        {"micro_batch_size": 4},
        {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 40, "tree_batches": "on"},
    ],
    ids=str,
)
def test_law_3_holds_for_a_loss_of_sums_of_sample_means(tiny_dir, settings):
    samples = group_samples()
    rows = [row for i, sample in enumerate(samples) for row in cut(sample, 3, 100 * i)]
    random.Random(3).shuffle(rows)
    whole_steps, whole = train(tiny_dir, samples)
    steps, grads = train(tiny_dir, rows, **settings)
    assert relative_gap(grads, whole) < 1e-5
    for name in ("loss", "my_ratio"):
        assert steps[0][name] == pytest.approx(whole_steps[0][name], rel=1e-5, abs=1e-6)


def test_later_steps_see_the_log_probs_from_before_the_first(tiny_dir):
    steps, _ = train(tiny_dir, group_samples(), size=2, lr=0.01)
    assert steps[0]["my_ratio"] == pytest.approx(1.0, abs=1e-5)
    assert abs(steps[2]["my_ratio"] - 1.0) > 1e-4


def test_the_batch_is_whole_rows_and_the_logits_are_the_models(tiny_dir):
    seen = {}

    def look(args, batch, logits, sum_of_sample_mean):
        seen.update(batch, logits=logits.detach(), args=args)
        return logits.sum() * 0.0, {}

    samples = group_samples()
    train(tiny_dir, samples, look)
    assert seen["args"].my_key == 3.0
    assert seen["logits"].shape[:2] == seen["tokens"].shape == (1, sum(len(s.tokens) for s in samples))
    assert sorted(seen["sample_indices"]) == sorted(seen["rollout_ids"]) == [0, 1, 2, 3, 4, 5]
    model = AutoModelForCausalLM.from_pretrained(tiny_dir, dtype=torch.float32)
    tokens = seen["unconcat_tokens"][0]
    with torch.no_grad():
        expected = model(tokens[None]).logits[0]
    assert torch.allclose(seen["logits"][0, : len(tokens)], expected, atol=1e-4)
    assert {"advantages", "log_probs", "rollout_log_probs", "loss_masks", "raw_reward"} <= seen.keys()


def test_advantages_can_be_left_out(tiny_dir):
    algorithm = AlgorithmConfig(
        loss_type="custom_loss", custom_loss_function_path="x", compute_advantages_and_returns=False
    )
    recorder = Recorder()
    train_on_rollouts(
        recorder, group_samples(), algorithm=algorithm, rollouts_per_step=9, hooks=hooks(loss=ppo)
    )
    assert not any(value for row in recorder.steps[0] for value in row.advantages)


def answers(value):
    return lambda args, batch, logits, sum_of_sample_mean: value(logits, sum_of_sample_mean)


@pytest.mark.parametrize(
    ("hook", "message"),
    [
        (answers(lambda x, s: x.sum()), r"returned Tensor, expected \(loss, metrics\)"),
        (answers(lambda x, s: (1.0, {})), "loss of float, expected one number with a gradient, for sample 0"),
        (answers(lambda x, s: (x.sum((0, 1)), {})), r"loss of \(259,\), expected one number"),
        (answers(lambda x, s: (x.sum().detach(), {})), "expected one number with a gradient"),
        (answers(lambda x, s: (x.sum() * math.nan, {})), r"returned the loss nan for sample 0 \(\d resp"),
        (answers(lambda x, s: (x.sum(), {"a": x[0, :, 0]})), r"metric 'a' has shape \(\d+,\)"),
        (answers(lambda x, s: (x.sum(), {"a": "b"})), "metric 'a' is 'b', expected a tensor of numbers"),
        (
            answers(lambda x, s: (s(x[0, :2, 0]), {})),
            r"gave sum_of_sample_mean 2 values; sample 0 .* have \d+ response tokens",
        ),
        (answers(lambda x, s: 1 / 0), "raised ZeroDivisionError"),
    ],
)
def test_a_loss_that_breaks_its_contract_is_named(tiny_dir, hook, message):
    with pytest.raises(HookError, match=message) as caught:
        train(tiny_dir, sorted(group_samples(groups=1, size=2), key=lambda s: s.index), hook)
    assert "--custom-loss-function-path (tests.loss)" in str(caught.value)

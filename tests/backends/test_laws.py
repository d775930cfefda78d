"""The laws of training on a real model; law 3 over all of the arithmetic is in tests/conformance."""

import math
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from slime.backends.update import train_on_rollouts
from slime.config.training_sections import AlgorithmConfig
from tests.backends.rollouts import gradients, group_samples, make_trainer, relative_gap

ALGORITHM = AlgorithmConfig(entropy_coef=0.01)


def train(folder, samples, algorithm=ALGORITHM, **settings):
    trainer = make_trainer(folder, algorithm=algorithm, **({"micro_batch_size": 64} | settings))
    update = train_on_rollouts(trainer, samples, algorithm=algorithm, rollouts_per_step=100)
    return update.steps[0], gradients(trainer)


@pytest.fixture(scope="module")
def reference(tiny_dir):
    return train(tiny_dir, group_samples(), tree_batches="off", micro_batch_size=1)


@pytest.mark.parametrize(
    "settings",
    [
        {"micro_batch_size": 1},
        {"micro_batch_size": 4},
        {"micro_batch_size": 64, "tree_batches": "off"},
        {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 24},
        {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 10_000},
        {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 40, "tree_batches": "off"},
        {"log_probs_chunk_size": 3},
    ],
    ids=str,
)
def test_law_3_packing_and_prefix_sharing_change_nothing(tiny_dir, reference, settings):
    metrics, grads = train(tiny_dir, group_samples(), **settings)
    assert relative_gap(grads, reference[1]) < 1e-5
    for name in ("loss", "pg_loss", "entropy_loss", "train_rollout_logprob_abs_diff", "grad_norm"):
        assert metrics[name] == pytest.approx(reference[0][name], rel=1e-5, abs=1e-6)


def test_law_1_tokens_with_mask_zero_have_no_influence(tiny_dir, reference):
    noisy = [
        replace(
            sample,
            rollout_log_probs=tuple(
                value if flag else -50.0
                for value, flag in zip(sample.rollout_log_probs, sample.loss_mask, strict=True)
            ),
        )
        for sample in group_samples()
    ]
    trailing = [
        replace(
            sample,
            tokens=(*sample.tokens, 7, 8),
            response_length=sample.response_length + 2,
            loss_mask=(*sample.loss_mask, 0, 0),
            rollout_log_probs=(*sample.rollout_log_probs, 0.0, 0.0),
        )
        for sample in noisy
    ]
    metrics, grads = train(tiny_dir, trailing)
    assert relative_gap(grads, reference[1]) < 1e-5
    assert metrics["tokens"] == reference[0]["tokens"]


def test_law_4_rows_without_vote_change_nothing(tiny_dir, reference):
    samples = group_samples()
    failed = replace(samples[0], index=90, rollout_id=90, reward=math.nan, votes=False)
    metrics, grads = train(tiny_dir, [failed, *samples])
    assert relative_gap(grads, reference[1]) < 1e-5
    assert metrics["rollouts"] == len(samples)


def test_rows_of_a_group_without_signal_are_evaluated_but_give_no_gradient(tiny_dir):
    samples = group_samples()
    flat = [replace(s, reward=1.0) if s.group_index == 0 else s for s in samples]
    algorithm = AlgorithmConfig()
    metrics, grads = train(tiny_dir, flat, algorithm)
    trainer = make_trainer(tiny_dir, algorithm=algorithm, micro_batch_size=64)
    alone = train_on_rollouts(
        trainer, [s for s in flat if s.group_index], algorithm=algorithm, rollouts_per_step=100
    ).steps[0]
    assert metrics["tokens"] > alone["tokens"]
    halves = {name: 2 * grad for name, grad in grads.items()}
    assert relative_gap(halves, gradients(trainer)) < 1e-5


@pytest.mark.parametrize("with_old", [False, True])
def test_known_answer_of_grpo_on_a_plain_forward(tiny_dir, with_old):
    algorithm = AlgorithmConfig(eps_clip=0.1, eps_clip_high=0.2, use_rollout_logprobs=with_old)
    samples = group_samples()
    _, grads = train(tiny_dir, samples, algorithm)
    model = AutoModelForCausalLM.from_pretrained(tiny_dir, dtype=torch.float32)
    total = torch.zeros(())
    for sample in samples:
        rewards = torch.tensor([s.reward for s in samples if s.group_index == sample.group_index])
        advantage = (sample.reward - rewards.mean()) / (rewards.std() + 1e-6)
        logits = model(torch.tensor([sample.tokens])).logits[0].float() / 1.3
        chosen = torch.tensor(sample.tokens[1:])
        log_p = logits[:-1].log_softmax(-1)[torch.arange(len(chosen)), chosen][-sample.response_length :]
        old = torch.tensor(sample.rollout_log_probs) if with_old else log_p.detach()
        ratio = (log_p - old).exp()
        loss = torch.max(-ratio * advantage, -ratio.clamp(0.9, 1.2) * advantage)
        mask = torch.tensor(sample.loss_mask)
        total = total + (loss * mask).sum() / mask.sum() / len(samples)
    total.backward()
    assert relative_gap(grads, {name: p.grad for name, p in model.named_parameters()}) < 1e-5


def test_supervised_loss_is_the_mean_negative_log_likelihood(tiny_dir):
    algorithm = AlgorithmConfig(loss_type="sft_loss")
    samples = group_samples()
    values = make_trainer(tiny_dir, algorithm=algorithm).log_probs(samples)
    means = [
        -sum(v for v, mask in zip(row, s.loss_mask, strict=True) if mask) / s.trained_tokens
        for row, s in zip(values, samples, strict=True)
    ]
    metrics, _ = train(tiny_dir, samples, algorithm)
    assert metrics["loss"] == pytest.approx(sum(means) / len(means), rel=1e-5)

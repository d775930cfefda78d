import os
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from slime.backends.base import StepRow, Trainer
from slime.backends.torch.trainer import TorchTrainer
from slime.backends.update import train_on_rollouts
from slime.config.sections import ModelConfig
from slime.config.training_sections import AlgorithmConfig, TrainConfig
from slime.errors import CheckpointError, ConfigError, DataError
from tests.backends.rollouts import group_samples, make_trainer
from tests.tiny import tiny_model_dir

ALGORITHM = AlgorithmConfig()


def run(trainer, seeds, algorithm=ALGORITHM):
    """Train on a rollout for each seed; returns the metrics."""
    return [
        train_on_rollouts(
            trainer, group_samples(seed=seed), algorithm=algorithm, rollouts_per_step=6
        ).metrics()
        for seed in seeds
    ]


def values(trainer):
    return {name: tensor.clone() for name, tensor in trainer.weights()}


def assert_equal(left, right):
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)


def test_log_probs_are_those_of_a_plain_forward(tiny_dir):
    trainer: Trainer = make_trainer(tiny_dir, micro_batch_size=4)
    model = AutoModelForCausalLM.from_pretrained(tiny_dir, dtype=torch.float32)
    samples = group_samples()
    for sample, found in zip(samples, trainer.log_probs(samples), strict=True):
        with torch.no_grad():
            log_p = (model(torch.tensor([sample.tokens])).logits[0] / 1.3).log_softmax(-1)
        expected = [
            log_p[i - 1, sample.tokens[i]].item() for i in range(sample.prompt_length, len(sample.tokens))
        ]
        assert found == pytest.approx(expected, abs=1e-5)


def test_resume_is_exact(tiny_dir, tmp_path):
    schedule = {"lr_decay_style": "cosine", "lr_warmup_iters": 1, "clip_grad": 0.5}
    straight = make_trainer(tiny_dir, **schedule)
    run(straight, range(4))
    first = make_trainer(tiny_dir, **schedule)
    run(first, range(2))
    torch.manual_seed(77)
    first.save(tmp_path / "checkpoint")
    after_save = torch.rand(1)
    second = make_trainer(tiny_dir, **schedule)
    second.load(tmp_path / "checkpoint")
    assert torch.equal(torch.rand(1), after_save)
    run(second, range(2, 4))
    assert_equal(values(second), values(straight))


def test_a_restart_takes_the_weights_and_begins_the_schedule_where_it_is_told(tiny_dir, tmp_path):
    schedule = {"lr_decay_style": "cosine", "lr_warmup_iters": 0}
    first = make_trainer(tiny_dir, **schedule)
    run(first, range(3))
    first.save(tmp_path / "checkpoint")
    straight = make_trainer(tiny_dir, **schedule)
    straight.load(tmp_path / "checkpoint", restart_at=1)
    assert_equal(values(straight), values(first))
    fresh = make_trainer(tiny_dir, **schedule)
    run(fresh, [0])
    assert run(straight, [0])[0]["train/lr"] == run(fresh, [1])[0]["train/lr"]
    straight.save(tmp_path / "restarted")
    resumed = make_trainer(tiny_dir, **schedule)
    resumed.load(tmp_path / "restarted")
    run(straight, [1])
    run(resumed, [1])
    assert_equal(values(resumed), values(straight))


def test_checkpoints_without_optimizer_state_load_only_where_asked_for(tiny_dir, tmp_path):
    trainer = make_trainer(tiny_dir, model={"no_save_optim": True})
    run(trainer, [0])
    trainer.save(tmp_path / "c")
    make_trainer(tiny_dir, model={"no_save_optim": True}).load(tmp_path / "c")
    with pytest.raises(CheckpointError, match="no optimizer state"):
        make_trainer(tiny_dir).load(tmp_path / "c")


def test_checkpoint_of_another_model_is_refused(tiny_dir, tmp_path):
    make_trainer(tiny_dir).save(tmp_path / "c")
    other = make_trainer(tiny_model_dir(tmp_path / "wide", hidden_size=32))
    with pytest.raises(CheckpointError, match="of another model"):
        other.load(tmp_path / "c")


@pytest.mark.parametrize("tied", [False, True])
def test_export_loads_and_gives_the_same_logits_from_aliased_storage(tmp_path, tied):
    trainer = make_trainer(tiny_model_dir(tmp_path / "model", tie_word_embeddings=tied))
    named = dict(trainer.weights())
    buffer = torch.zeros(sum(tensor.numel() for tensor in named.values()))
    views, offset = {}, 0
    for name, tensor in named.items():
        views[name] = buffer[offset : offset + tensor.numel()].view(tensor.shape)
        offset += tensor.numel()
    trainer.alias_parameters(views)
    run(trainer, [0])
    trainer.save(tmp_path / "checkpoint")
    run(trainer, [1])
    trainer.load(tmp_path / "checkpoint")
    trainer.save_hf(tmp_path / "export")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype=torch.float32)
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        trained = trainer._model.module
        trained.set_attn_implementation("sdpa")
        assert torch.equal(model(ids).logits, trained(ids).logits)
    assert AutoTokenizer.from_pretrained(tmp_path / "export").chat_template
    assert all(tensor.data_ptr() == views[name].data_ptr() for name, tensor in trainer.weights())
    assert ("lm_head.weight" in named) != tied


def test_an_export_has_the_buffers_of_the_model_too(tmp_path):
    sizes = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    routing = {"first_k_dense_replace": 1, "n_shared_experts": 1, "n_group": 1, "topk_group": 1}
    folder = tiny_model_dir(tmp_path / "model", arch="glm4_moe", **sizes, **routing)
    make_trainer(folder).save_hf(tmp_path / "export")
    names = [set(load_file(f / "model.safetensors")) for f in (folder, tmp_path / "export")]
    assert names[0] == names[1] and any("bias" in name for name in names[0])


def test_aliasing_refuses_storage_that_does_not_fit(tiny_dir):
    trainer = make_trainer(tiny_dir)
    with pytest.raises(ConfigError, match="got nothing"):
        trainer.alias_parameters({})
    elsewhere = {name: torch.empty_like(p, device="meta") for name, p in trainer.named_parameters()}
    with pytest.raises(ConfigError, match=f"on {trainer.device}.* on meta"):
        trainer.alias_parameters(elsewhere)
    assert {p.device for _, p in trainer.named_parameters()} == {trainer.device}


def test_the_device_can_be_chosen(tiny_dir):
    config = ModelConfig(hf_checkpoint=str(tiny_dir)), AlgorithmConfig(), TrainConfig()
    trainer = TorchTrainer(*config, temperature=1.0, total_steps=1, device="cpu")
    assert trainer.device == torch.device("cpu")
    with pytest.raises(ConfigError, match="'abacus'"):
        TorchTrainer(*config, temperature=1.0, total_steps=1, device="abacus")


def test_threads_are_as_many_as_the_cpus_that_may_be_used(tiny_dir):
    allowed, threads = os.sched_getaffinity(0), torch.get_num_threads()
    os.sched_setaffinity(0, {min(allowed)})
    try:
        make_trainer(tiny_dir, train_num_threads=None)
        assert torch.get_num_threads() == 1
    finally:
        os.sched_setaffinity(0, allowed)
        torch.set_num_threads(threads)


def test_reference_model_gives_the_kl_term(tiny_dir):
    algorithm = AlgorithmConfig(use_kl_loss=True, kl_loss_coef=0.1, kl_loss_type="k3")
    trainer = make_trainer(tiny_dir, algorithm=algorithm)
    samples = group_samples()
    update = [
        train_on_rollouts(trainer, samples, algorithm=algorithm, rollouts_per_step=6).steps[0]
        for _ in range(2)
    ]
    assert update[0]["kl_loss"] == pytest.approx(0.0, abs=1e-6)
    assert update[1]["kl_loss"] > 1e-6
    with pytest.raises(ConfigError, match="use-kl-loss"):
        make_trainer(tiny_dir).log_probs(samples, reference=True)


def test_bfloat16_trains(tiny_dir):
    trainer = make_trainer(tiny_dir, train_precision="bfloat16")
    before = values(trainer)
    run(trainer, [0])
    assert trainer.precision == "bfloat16"
    assert any(not torch.equal(before[name], tensor) for name, tensor in trainer.weights())


def test_sleep_drops_gradients_and_wake_takes_the_threads_again(tiny_dir):
    trainer = make_trainer(tiny_dir)
    run(trainer, [0])
    trainer.sleep()
    assert all(p.grad is None for _, p in trainer.named_parameters())
    trainer.wake()
    run(trainer, [1])


def test_lists_that_do_not_fit_name_the_sample(tiny_dir):
    trainer = make_trainer(tiny_dir)
    sample = group_samples()[4]
    row = StepRow(sample=sample, advantages=(1.0,) * sample.response_length, weight=1.0)
    for bad, message in [
        (replace(row, advantages=(1.0,)), "advantages has length 1"),
        (replace(row, old_log_probs=(1.0, 2.0)), "old_log_probs has length 2"),
        (replace(row, weight=float("nan")), "not finite"),
        (
            replace(row, sample=replace(sample, tokens=sample.tokens[-sample.response_length :])),
            "no token before",
        ),
    ]:
        with pytest.raises(DataError, match=message) as caught:
            trainer.step([bad])
        assert "sample 4" in str(caught.value)


def test_a_step_without_trained_tokens_has_no_gradient(tiny_dir):
    trainer = make_trainer(tiny_dir, use_dynamic_batch_size=True, max_tokens_per_gpu=64)
    assert trainer.log_probs([]) == []
    metrics = trainer.step([])
    assert (metrics["tokens"], metrics["grad_norm"]) == (0.0, 0.0)


def test_a_dynamic_batch_size_needs_a_budget(tiny_dir):
    with pytest.raises(ConfigError, match="budget"):
        make_trainer(tiny_dir, use_dynamic_batch_size=True)

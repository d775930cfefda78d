import importlib.util
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from slime.backends.update import train_on_rollouts
from slime.config.training_sections import AlgorithmConfig
from slime.errors import CheckpointError, ConfigError
from slime.ray.delivery import TrainerSharing
from slime.ray.train_actor import TrainActor
from slime.serving.weights.shared import SharedWeights
from tests.backends.rollouts import gradients, group_samples, make_trainer, relative_gap
from tests.backends.test_trainer import assert_equal, run, values
from tests.tiny import tiny_model_dir

KL = AlgorithmConfig(use_kl_loss=True, kl_loss_coef=0.1, kl_loss_type="k3")


def lora_trainer(folder, **options):
    return make_trainer(folder, **({"lora_rank": 4, "lora_alpha": 16.0, "lr": 1e-2} | options))


def base(folder):
    return dict(make_trainer(folder).weights())


def hf_log_probs(model, samples):
    found = []
    for sample in samples:
        with torch.no_grad():
            log_p = (model(torch.tensor([sample.tokens])).logits[0] / 1.3).log_softmax(-1)
        found += [
            log_p[i - 1, sample.tokens[i]].item() for i in range(sample.prompt_length, len(sample.tokens))
        ]
    return found


def flat(lists):
    return [value for values in lists for value in values]


@pytest.mark.parametrize("tied", [False, True])
def test_fresh_adapters_change_nothing_and_weights_have_the_models_own_names(tmp_path, tied):
    folder = tiny_model_dir(tmp_path / "m", tie_word_embeddings=tied)
    trainer = lora_trainer(folder)
    assert_equal(values(trainer), base(folder))
    assert trainer.log_probs(group_samples()) == make_trainer(folder).log_probs(group_samples())


def test_only_adapters_train_and_the_reference_is_the_base_to_the_bit(tiny_dir):
    trainer = lora_trainer(tiny_dir, algorithm=KL)
    assert all(".lora_" in name for name, _ in trainer.named_parameters())
    assert trainer._score_reference is trainer._score
    before = trainer.log_probs(group_samples(), reference=True)
    metrics = run(trainer, range(3), KL)
    assert metrics[0]["train/kl_loss"] == pytest.approx(0.0, abs=1e-6) and metrics[2]["train/kl_loss"] > 1e-6
    assert trainer.log_probs(group_samples(), reference=True) == before
    assert trainer.log_probs(group_samples()) != before
    frozen = dict(trainer._lora._frozen())
    assert_equal({name.replace(".base_layer.", "."): p for name, p in frozen.items()}, base(tiny_dir))


def test_merged_weights_are_base_plus_scaled_product_after_any_number_of_updates(tiny_dir):
    trainer = lora_trainer(tiny_dir, algorithm=KL)
    start = base(tiny_dir)
    for seed in range(5):
        run(trainer, [seed], KL)
        adapters = dict(trainer.named_parameters())
        for name, weight in trainer.weights():
            stem = name.removesuffix(".weight")
            exact = start[name].double()
            if f"{stem}.lora_A.default.weight" in adapters:
                a, b = (adapters[f"{stem}.lora_{x}.default.weight"].detach().double() for x in "AB")
                exact = exact + 4.0 * (b @ a)
            assert (weight.double() - exact).abs().max() <= 1e-6 * exact.abs().max()


def test_gradients_do_not_depend_on_prefix_sharing_or_micro_batches(tiny_dir):
    found = []
    for options in (
        {"micro_batch_size": 6},
        {"micro_batch_size": 6, "tree_batches": "off"},
        {"micro_batch_size": 1},
    ):
        trainer = lora_trainer(tiny_dir, **options)
        run(trainer, [0])  # B is not zero behind it
        run(trainer, [1])
        found.append(gradients(trainer))
    assert relative_gap(found[1], found[0]) < 1e-5 and relative_gap(found[2], found[0]) < 1e-5


def test_gradients_are_those_of_the_merged_weights(tiny_dir):
    """Chain rule: the gradient of B is scale * G A^T, of A scale * B^T G, with G that of the weight."""
    trainer = lora_trainer(tiny_dir)
    run(trainer, [0])
    adapters = {name: p.detach().clone() for name, p in trainer.named_parameters()}
    full = make_trainer(tiny_dir)
    merged = values(trainer)
    with torch.no_grad():
        for name, parameter in full.named_parameters():
            parameter.copy_(merged[name])
    run(trainer, [1])
    run(full, [1])
    expected = {}
    for name in adapters:
        stem, matrix = name.split(".lora_")
        weight_gradient = dict(full.named_parameters())[f"{stem}.weight"].grad
        a, b = (adapters[f"{stem}.lora_{x}.default.weight"] for x in "AB")
        product = weight_gradient @ a.T if matrix.startswith("B") else b.T @ weight_gradient
        expected[name] = 4.0 * product
    assert relative_gap(gradients(trainer), expected) < 1e-5


def test_checkpoint_holds_adapters_only_and_resume_is_exact(tiny_dir, tmp_path):
    straight = lora_trainer(tiny_dir)
    run(straight, range(4))
    first = lora_trainer(tiny_dir)
    run(first, range(2))
    first.save(tmp_path / "c")
    second = lora_trainer(tiny_dir)
    second.load(tmp_path / "c")
    run(second, range(2, 4))
    assert_equal(values(second), values(straight))
    adapters = sum(p.numel() for _, p in first.named_parameters())
    size = sum(path.stat().st_size for path in (tmp_path / "c").glob("[mo]*.safetensors"))
    assert size < 3 * 4 * adapters + 20_000


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lora_alpha": 8.0}, "alpha 16.0, the run's 8.0"),
        ({"lora_rank": 2}, "rank 4, the run's 2"),
        ({"lora_target_modules": ["q_proj"]}, "layers of 14 layers.*of 2 layers"),
        ({"lora_rank": 0}, "it has LoRA adapters and the run has none"),
    ],
)
def test_checkpoint_of_other_adapters_is_refused(tiny_dir, tmp_path, options, message):
    lora_trainer(tiny_dir).save(tmp_path / "c")
    with pytest.raises(CheckpointError, match=message):
        lora_trainer(tiny_dir, **options).load(tmp_path / "c")


def test_checkpoint_over_another_base_or_without_adapters_is_refused(tiny_dir, tmp_path):
    lora_trainer(tiny_dir).save(tmp_path / "c")
    other = tiny_model_dir(tmp_path / "other", seed=1)
    with pytest.raises(CheckpointError, match="hf-checkpoint"):
        lora_trainer(other).load(tmp_path / "c")
    make_trainer(tiny_dir).save(tmp_path / "full")
    with pytest.raises(CheckpointError, match="the run has LoRA adapters and it has none"):
        lora_trainer(tiny_dir).load(tmp_path / "full")


@pytest.mark.parametrize("tied", [False, True])
def test_export_is_a_merged_folder_and_a_peft_folder_with_the_trainers_log_probs(tmp_path, tied):
    from peft import PeftModel

    folder = tiny_model_dir(tmp_path / "model", tie_word_embeddings=tied)
    trainer = lora_trainer(folder)
    run(trainer, range(2))
    trainer.save_hf(tmp_path / "export")
    samples = group_samples()
    ours = flat(trainer.log_probs(samples))
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype=torch.float32)
    assert hf_log_probs(merged, samples) == pytest.approx(ours, abs=1e-5)
    assert_equal({name: p.detach() for name, p in merged.named_parameters()}, values(trainer))
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert hf_log_probs(plain, samples) != pytest.approx(ours, abs=1e-3)
    loaded = PeftModel.from_pretrained(plain, tmp_path / "export" / "adapter")
    assert hf_log_probs(loaded, samples) == pytest.approx(ours, abs=1e-5)
    trainer.save_hf(tmp_path / "export")


def test_adapters_alone_are_written_as_peft_reads_them(tiny_dir, tmp_path):
    trainer = lora_trainer(tiny_dir)
    trainer.save_hf(tmp_path / "export")
    trainer.save_adapter(tmp_path / "alone")
    trainer.save_adapter(tmp_path / "alone")
    one, other = (
        load_file(tmp_path / name / "adapter_model.safetensors") for name in ("alone", "export/adapter")
    )
    assert one.keys() == other.keys()
    assert all(one[name].equal(other[name]) for name in one)
    assert (tmp_path / "alone" / "adapter_config.json").is_file()
    with pytest.raises(ConfigError, match="no adapters"):
        make_trainer(tiny_dir).save_adapter(tmp_path / "none")


def test_experts_of_a_mixture_stay_as_they_are_and_its_other_layers_get_adapters(tmp_path):
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    trainer = lora_trainer(tiny_model_dir(tmp_path / "m", arch="qwen3_moe", **sizes))
    run(trainer, [0])
    trainer.save_hf(tmp_path / "export")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype=torch.float32)
    ours = flat(trainer.log_probs(group_samples()))
    assert hf_log_probs(merged, group_samples()) == pytest.approx(ours, abs=1e-5)
    assert {name.split(".")[4] for name, _ in trainer.named_parameters()} == {
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
    }


def test_published_weights_alias_what_has_no_adapter_and_follow_the_rest(tiny_dir):
    trainer = lora_trainer(tiny_dir)
    shared = SharedWeights.create(trainer.weights())
    try:
        trainer.alias_parameters(shared.views)
        sharing = TrainerSharing(shares_memory=True, engine_dtype="float32", sleeps=False)
        actor = SimpleNamespace(_trainer=trainer, _weights=shared, _sharing=sharing)
        for seed in range(3):
            run(trainer, [seed])
            TrainActor._publish(actor)
            assert_equal(shared.views, values(trainer))
        aliased = {name for name, w in trainer.weights() if w.data_ptr() == shared.views[name].data_ptr()}
        assert "model.embed_tokens.weight" in aliased and "lm_head.weight" in aliased
        assert not any("_proj" in name for name in aliased)
        assert "model.layers.0.self_attn.q_proj.weight" in shared.views
    finally:
        shared.unlink()


def test_targets_that_are_not_there_or_are_the_output_layer_are_refused(tiny_dir):
    for targets in (["nowhere"], ["lm_head"], ["embed_tokens"]):
        with pytest.raises(ConfigError, match="--lora-target-modules"):
            lora_trainer(tiny_dir, lora_target_modules=targets)
    some = lora_trainer(tiny_dir, lora_target_modules=["q_proj", "v_proj"])
    assert len(list(some.named_parameters())) == 2 * 2 * 2


def test_the_frozen_output_layer_gets_no_gradient(tiny_dir):
    trainer = lora_trainer(tiny_dir)
    run(trainer, [0])
    assert all(p.grad is None for _, p in trainer._lora._frozen())


def test_a_separate_reference_folder_is_loaded(tiny_dir, tmp_path):
    other = tiny_model_dir(tmp_path / "other", seed=1)
    trainer = lora_trainer(tiny_dir, algorithm=KL, model={"ref_load": str(other)})
    reference = trainer.log_probs(group_samples(), reference=True)
    assert reference == make_trainer(other).log_probs(group_samples())


def test_adapters_work_with_checkpointed_layers(tiny_dir):
    found = []
    for recompute in (False, True):
        trainer = lora_trainer(tiny_dir, gradient_checkpointing=recompute)
        run(trainer, range(2))
        found.append(gradients(trainer))
    assert_equal(*found)


def test_without_peft_the_remedy_is_named(tiny_dir, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "peft", None)
    with pytest.raises(ConfigError, match=r"slime\[lora\]"):
        lora_trainer(tiny_dir)
    assert importlib.util.find_spec("torch")


def test_a_group_is_learned(tiny_dir):
    trainer = lora_trainer(tiny_dir)
    samples = group_samples()
    before = flat(trainer.log_probs(samples[:1]))
    for _ in range(4):
        train_on_rollouts(trainer, samples, algorithm=AlgorithmConfig(), rollouts_per_step=6)
    assert sum(flat(trainer.log_probs(samples[:1]))) > sum(before)


def test_bfloat16_products_train_adapters(tiny_dir):
    trainer = lora_trainer(tiny_dir, train_precision="bfloat16")
    exact = lora_trainer(tiny_dir)
    run(trainer, [0])
    run(exact, [0])
    assert relative_gap(gradients(trainer), gradients(exact)) < 0.05

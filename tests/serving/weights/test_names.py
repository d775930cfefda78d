"""Names of weights on their way: those that `save_pretrained` writes."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from slime.serving.weights.names import chained, checkpoint_names
from slime.serving.weights.quantise import WeightFolder, quantiser_of
from slime.serving.weights.quantise.convert import Target, convert_folder
from tests.tiny import tiny_model_dir

SIZES = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
GLM = {
    "n_routed_experts": 4,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
}
MODELS = {
    "qwen3_moe": {"num_experts": 4},
    "qwen2_moe": {"num_experts": 4, "shared_expert_intermediate_size": 32},
    "mixtral": {"num_local_experts": 4},
    "olmoe": {"num_experts": 4},
    "glm4_moe": GLM,
}


def sent(folder, transform):
    module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return {n: t for name, weight in module.named_parameters() for n, t in transform(name, weight)}


@pytest.mark.parametrize("arch", MODELS)
def test_experts_are_sent_one_by_one_under_the_names_of_the_checkpoint(tmp_path, arch):
    folder = tiny_model_dir(tmp_path / arch, arch=arch, **SIZES, **MODELS[arch])
    found, wanted = sent(folder, checkpoint_names(folder)), load_file(folder / "model.safetensors")
    wanted = {name: tensor for name, tensor in wanted.items() if "correction" not in name}
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_and_then_quantised(tmp_path):
    plain = tiny_model_dir(tmp_path / "plain", arch="qwen3_moe", **SIZES, num_experts=4)
    (tmp_path / "fp8").mkdir()
    convert_folder(plain, tmp_path / "fp8", Target(form="fp8", size=32))
    folder = WeightFolder(tmp_path / "fp8")
    transform = chained(checkpoint_names(folder.path), quantiser_of(folder.config, folder.names))
    found, wanted = sent(plain, transform), load_file(tmp_path / "fp8" / "model.safetensors")
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name].float(), wanted[name].float()) for name in wanted)


def test_dense_models_have_the_same_names(tmp_path):
    assert checkpoint_names(Path(tiny_model_dir(tmp_path / "dense"))) is None

import json

import pytest
import torch

from slime.backends.torch.model import compute_dtype, find_device, load_model
from slime.errors import ConfigError, ModelError
from tests.tiny import tiny_model_dir


@pytest.mark.parametrize(
    ("arch", "extra"),
    [
        ("qwen3", {}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("gemma3_text", {"sliding_window": 3}),
        ("granite", {"logits_scaling": 4.0}),
        ("cohere", {}),
    ],
)
def test_packed_equals_plain_for_other_architectures(tmp_path, arch, extra):
    load_model(tiny_model_dir(tmp_path / arch, arch=arch, **extra))  # compares them, and raises ModelError


@pytest.mark.parametrize(
    ("arch", "message"), [("gemma2", "soft-capped"), ("mamba", "linear_attention"), ("gpt_oss", "sinks")]
)
def test_architectures_that_cannot_be_packed_are_refused(tmp_path, arch, message):
    folder = tiny_model_dir(tmp_path / arch, arch=arch)
    with pytest.raises(ModelError, match=message) as caught:
        load_model(folder)
    assert arch in str(caught.value)


def test_bad_folders_are_named(tmp_path, tiny_dir):
    with pytest.raises(ModelError, match="no such model folder"):
        load_model(tmp_path / "nowhere")
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ModelError, match=r"config\.json"):
        load_model(empty)
    (empty / "config.json").write_text(json.dumps({"model_type": "vit"}))
    with pytest.raises(ModelError, match="not a causal language model"):
        load_model(empty)
    (empty / "config.json").write_text((tiny_dir / "config.json").read_text())
    with pytest.raises(ModelError, match="not a causal language model"):
        load_model(empty)


def test_missing_weights_are_an_error(tmp_path, tiny_dir):
    from safetensors.torch import load_file, save_file

    folder = tiny_model_dir(tmp_path / "part")
    weights = load_file(folder / "model.safetensors")
    weights.pop("model.layers.1.mlp.up_proj.weight")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match="1 weights are missing"):
        load_model(folder)


def test_pickled_weights_are_not_read(tmp_path):
    from safetensors.torch import load_file

    folder = tiny_model_dir(tmp_path / "pickled")
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model\.safetensors[\s\S]*remedy.*never read"):
        load_model(folder)


def test_precision_names():
    cpu = torch.device("cpu")
    assert compute_dtype("float32", cpu) == torch.float32
    assert compute_dtype("bfloat16", cpu) == torch.bfloat16
    assert compute_dtype("auto", torch.device("cuda")) == torch.bfloat16


def test_devices_are_found_by_name():
    assert find_device("cpu") == torch.device("cpu")
    assert find_device(None).type == ("cuda" if torch.cuda.is_available() else "cpu")
    for name in ("abacus", "meta", "cuda:99"):
        with pytest.raises(ConfigError, match=name):
            find_device(name)

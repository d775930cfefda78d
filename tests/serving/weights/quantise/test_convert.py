import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from slime.backends.torch.model import load_model as load_for_training
from slime.cli.convert import convert, main
from slime.errors import ModelError
from slime.serving.embedded.model_loader import load_model as load_for_serving
from slime.serving.weights.quantise import WeightFolder, quantiser_of, read_config
from tests.tiny import tiny_model_dir

QUERY = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return tiny_model_dir(tmp_path_factory.mktemp("tiny") / "plain", arch="qwen3")


def stored(folder):
    tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


def same(a, b):
    return a.keys() == b.keys() and all(
        a[n].dtype == b[n].dtype
        and a[n].shape == b[n].shape
        and torch.equal(a[n].contiguous().view(torch.uint8), b[n].contiguous().view(torch.uint8))
        for n in a
    )


@pytest.mark.parametrize("form", ["fp8", "fp8-ue8m0", "fp8-channel", "fp8-tensor", "int4"])
def test_a_folder_goes_there_and_back_and_there_without_a_change(plain, tmp_path, form):
    sizes = [] if form.endswith(("channel", "tensor")) else ["--block-size", "32"]
    there = ["--quantization", form, *sizes]
    assert main([str(plain), str(tmp_path / "q"), *there]) == 0
    assert main([str(tmp_path / "q"), str(tmp_path / "back")]) == 0
    assert main([str(tmp_path / "back"), str(tmp_path / "again"), *there]) == 0
    assert same(stored(tmp_path / "q"), stored(tmp_path / "again"))
    assert stored(tmp_path / "back").keys() == stored(plain).keys()
    assert (tmp_path / "q" / ".slime").is_file()
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("q", "back", "again")]
    assert ["quantization_config" in config for config in configs] == [True, False, True]
    assert AutoTokenizer.from_pretrained(tmp_path / "q").chat_template
    untouched = [name for name in stored(plain) if "norm" in name or "embed" in name or "lm_head" in name]
    q = stored(tmp_path / "q")
    assert untouched and all(torch.equal(q[name], stored(plain)[name]) for name in untouched)


def test_trainer_and_engine_start_from_the_weights_that_are_meant(plain, tmp_path):
    convert(str(plain), tmp_path / "fp8", form="fp8", size=32)
    convert(str(tmp_path / "fp8"), tmp_path / "back")
    meant = stored(tmp_path / "back")
    trained = load_for_training(tmp_path / "fp8", device="cpu")
    assert all(torch.equal(p, meant[name]) for name, p in trained.module.named_parameters())
    assert not torch.equal(meant[QUERY], stored(plain)[QUERY])
    served = load_for_serving(str(tmp_path / "fp8"), torch.float32)
    assert torch.equal(dict(served.runner.model.named_parameters())[QUERY], meant[QUERY])
    trained.module.save_pretrained(tmp_path / "export")
    assert "quantization_config" not in read_config(tmp_path / "export")


def test_a_mixture_of_experts_loads_from_fp8_experts_that_are_stored_apart(tmp_path):
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    source = tiny_model_dir(tmp_path / "moe", arch="qwen3_moe", **sizes)
    convert(str(source), tmp_path / "fp8", form="fp8", size=32)
    names = set(stored(tmp_path / "fp8"))
    assert "model.layers.0.mlp.experts.3.up_proj.weight_scale_inv" in names
    assert "model.layers.0.mlp.gate.weight_scale_inv" not in names
    listed = read_config(tmp_path / "fp8")["quantization_config"]["modules_to_not_convert"]
    assert {"lm_head", "model.layers.1.mlp.gate"} <= set(listed)
    load_for_training(tmp_path / "fp8", device="cpu")


def test_outgoing_weights_of_a_trainer_are_those_of_its_checkpoint(plain, tmp_path):
    convert(str(plain), tmp_path / "fp8", form="fp8", size=32)
    folder = WeightFolder(tmp_path / "fp8")
    quantise = quantiser_of(folder.config, folder.names)
    module = load_for_training(tmp_path / "fp8", device="cpu").module
    sent = {n: t for name, p in module.named_parameters() for n, t in quantise(name, p)}
    assert same(sent, stored(tmp_path / "fp8"))


def test_shards_stay_shards_and_a_scale_may_lie_in_another(plain, tmp_path):
    tensors = stored(plain)
    names = sorted(tensors)
    source = tmp_path / "sharded"
    source.mkdir()
    for number, part in enumerate((names[::2], names[1::2]), 1):
        file = f"model-0000{number}-of-00002.safetensors"
        save_file({n: tensors[n] for n in part}, source / file)
    (source / "config.json").write_text((plain / "config.json").read_text())
    convert(str(source), tmp_path / "fp8", form="fp8", size=32)
    index = json.loads((tmp_path / "fp8" / "model.safetensors.index.json").read_text())
    whole = stored(tmp_path / "fp8")
    assert set(index["weight_map"]) == set(whole)
    assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in whole.values())
    moved = load_file(tmp_path / "fp8" / "model-00002-of-00002.safetensors")
    scale = next(n for n in whole if n.endswith("_scale_inv") and n not in moved)
    moved[scale] = whole[scale]
    first = load_file(tmp_path / "fp8" / "model-00001-of-00002.safetensors")
    del first[scale]
    save_file(moved, tmp_path / "fp8" / "model-00002-of-00002.safetensors")
    save_file(first, tmp_path / "fp8" / "model-00001-of-00002.safetensors")
    convert(str(tmp_path / "fp8"), tmp_path / "back")
    assert stored(tmp_path / "back").keys() == tensors.keys()


def test_layers_can_be_kept_and_dtypes_chosen(plain, tmp_path):
    options = [
        "--quantization",
        "fp8",
        "--block-size",
        "32",
        "--dtype",
        "bfloat16",
        "--keep",
        "q_proj",
        "re:.*o_proj",
    ]
    assert main([str(plain), str(tmp_path / "fp8"), *options]) == 0
    found = stored(tmp_path / "fp8")
    assert found[QUERY].dtype == found["model.norm.weight"].dtype == torch.bfloat16
    assert found["model.layers.1.self_attn.o_proj.weight"].dtype == torch.bfloat16
    assert found["model.layers.1.self_attn.k_proj.weight"].dtype == torch.float8_e4m3fn
    config = read_config(tmp_path / "fp8")
    assert config["dtype"] == "bfloat16"
    assert "model.layers.1.self_attn.o_proj" in config["quantization_config"]["modules_to_not_convert"]


def test_weights_that_the_library_dequantises_are_ours(plain, tmp_path):
    """transformers with compressed-tensors loads the weights of our dequantised folder."""
    pytest.importorskip("compressed_tensors")
    for form in ("int4", "fp8-channel"):
        convert(str(plain), tmp_path / form, form=form, size=32)
        convert(str(tmp_path / form), tmp_path / f"{form}-back")
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path / form, dtype=torch.float32)
        ours = AutoModelForCausalLM.from_pretrained(tmp_path / f"{form}-back", dtype=torch.float32)
        theirs(torch.tensor([[3]]))  # the first forward decompresses
        found = dict(theirs.named_parameters())
        assert all(torch.equal(found[name], weight) for name, weight in ours.named_parameters())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: t.pop(QUERY + "_scale_inv"),
            r"q_proj\.weight: is torch.float8_e4m3fn.*does not tell its scales",
        ),
        (lambda t: t.pop(QUERY), r"1 parts of quantised weights belong to none.*q_proj.weight_scale_inv"),
        (
            lambda t: t.update({QUERY + "_scale_inv": torch.ones(3, 3)}),
            r"scales of shape \[3, 3\], the config asks for \[2, 2\]",
        ),
        (lambda t: t.update({QUERY: torch.ones(64, 64)}), r"is torch.float32 .*the config says FP8"),
    ],
)
def test_a_damaged_folder_is_refused_by_name(plain, tmp_path, change, message):
    convert(str(plain), tmp_path / "fp8", form="fp8", size=32)
    tensors = stored(tmp_path / "fp8")
    change(tensors)
    save_file(tensors, tmp_path / "fp8" / "model.safetensors")
    with pytest.raises(ModelError, match=message):
        convert(str(tmp_path / "fp8"), tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_forms_for_gguf_and_names_without_a_layer_are_refused(plain, tmp_path, capsys):
    (tmp_path / "a.gguf").write_bytes(b"")
    with pytest.raises(ModelError, match="only model folders are quantised"):
        convert(str(tmp_path / "a.gguf"), tmp_path / "out", form="fp8")
    with pytest.raises(ModelError, match="--keep nothing: fits no module"):
        convert(str(plain), tmp_path / "out", form="fp8", keep=["nothing"])
    for words, flag in ((["--block-size", "8"], "--block-size"), (["--keep", "a"], "--keep")):
        with pytest.raises(SystemExit):
            main([str(plain), str(tmp_path / "out"), *words])
        assert f"{flag} has no effect without --quantization" in capsys.readouterr().err

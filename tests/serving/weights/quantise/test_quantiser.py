import pytest
import torch

from slime.errors import ModelError
from slime.serving.weights.quantise import quantiser_of
from slime.serving.weights.quantise.forms import FORMS, section_of

QUERY = "model.layers.0.self_attn.q_proj.weight"
BLOCK_FP8 = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}


def config(section, **more):
    return {"dtype": "bfloat16", "quantization_config": section, **more}


def weights_of(rows=200, columns=384, seed=0):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 0.02


def sent(section, name, tensor, names=None):
    return dict(quantiser_of(config(section), names)(name, tensor))


def compressed(weights, form, **group):
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, **group}}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": groups,
        "ignore": ["lm_head"],
    }


def test_without_a_config_weights_pass_as_they_are():
    weight = weights_of()
    ((name, passed),) = quantiser_of({})(QUERY, weight)
    assert name == QUERY and passed is weight


def test_block_fp8_has_the_layout_of_deepseek_v3():
    found = sent(BLOCK_FP8, QUERY, weights_of())
    assert list(found) == [QUERY, QUERY + "_scale_inv"]
    codes, scales = found.values()
    assert (codes.dtype, codes.shape) == (torch.float8_e4m3fn, (200, 384))
    assert (scales.dtype, scales.shape) == (torch.float32, (2, 3))


def test_what_is_no_linear_layer_or_is_listed_stays():
    section = BLOCK_FP8 | {"modules_to_not_convert": ["model.layers.1.mlp", "kv_b_proj", "re:.*visual.*"]}
    names = [
        "model.embed_tokens.weight",
        "lm_head.weight",
        "model.layers.0.mlp.gate.weight",
        "model.layers.0.mlp.shared_expert_gate.weight",
        "model.layers.1.mlp.down_proj.weight",
        "model.layers.0.self_attn.kv_b_proj.weight",
        "model.visual.blocks.0.mlp.fc1.weight",
    ]
    for name in names:
        assert list(sent(section, name, weights_of())) == [name]
    norm = {"model.norm.weight": torch.ones(4)}
    assert list(sent(section, "model.norm.weight", norm["model.norm.weight"])) == list(norm)
    assert len(sent(section, "model.layers.10.mlp.down_proj.weight", weights_of())) == 2
    assert len(sent(section, "model.layers.0.mlp.gate_proj.weight", weights_of())) == 2


def test_the_checkpoint_itself_decides_where_its_names_are_known():
    names = frozenset({QUERY, "lm_head.weight", "lm_head.weight_scale_inv"})
    assert list(sent(BLOCK_FP8, QUERY, weights_of(), names)) == [QUERY]
    assert len(sent(BLOCK_FP8, "lm_head.weight", weights_of(), names)) == 2


def test_int4_has_the_layout_of_compressed_tensors():
    section = section_of("int4", 128, ["lm_head"])
    found = sent(section, QUERY, weights_of())
    stem = QUERY.removesuffix("weight")
    assert list(found) == [stem + "weight_packed", stem + "weight_scale", stem + "weight_shape"]
    packed, scales, shape = found.values()
    assert (packed.dtype, packed.shape) == (torch.int32, (200, 48))
    assert (scales.dtype, scales.shape) == (torch.bfloat16, (200, 3))
    assert (shape.dtype, shape.tolist()) == (torch.int64, [200, 384])


@pytest.mark.parametrize(("strategy", "shape"), [("tensor", (1,)), ("channel", (200, 1)), ("block", (2, 3))])
def test_compressed_fp8_has_a_scale_for_each(strategy, shape):
    weights = {
        "num_bits": 8,
        "type": "float",
        "strategy": strategy,
        "symmetric": True,
        "block_structure": [128, 128],
    }
    found = sent(compressed(weights, "float-quantized"), QUERY, weights_of())
    assert list(found) == [QUERY, QUERY + "_scale"]
    assert found[QUERY + "_scale"].shape == shape
    assert found[QUERY + "_scale"].dtype == torch.bfloat16


def test_a_tensor_of_fp8_without_blocks_has_one_scale():
    found = sent({"quant_method": "fp8"}, QUERY, weights_of())
    assert list(found) == [QUERY, QUERY + "_scale"] and found[QUERY + "_scale"].shape == (1,)


def test_targets_may_be_names_and_expressions():
    weights = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
    section = compressed(weights, "float-quantized")
    section["config_groups"]["group_0"]["targets"] = [r"re:.*mlp\.down_proj$"]
    assert list(sent(section, QUERY, weights_of())) == [QUERY]
    assert len(sent(section, "model.layers.3.mlp.down_proj.weight", weights_of())) == 2


@pytest.mark.parametrize("form", [form for form in FORMS if form != "none"])
def test_shapes_are_told_without_values(form):
    quantise = quantiser_of(config(section_of(form, 64, [])))
    weight = weights_of()
    real, meta = dict(quantise(QUERY, weight)), dict(quantise(QUERY, weight.to("meta")))
    assert {n: (t.shape, t.dtype) for n, t in real.items()} == {
        n: (t.shape, t.dtype) for n, t in meta.items()
    }


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("form", ["fp8", "int4"])
def test_what_is_not_finite_is_refused_by_name(bad, form):
    weight = weights_of()
    weight[7, 9] = bad
    with pytest.raises(ModelError, match=r"q_proj\.weight: holds numbers that are not finite"):
        sent(section_of(form, 128, []), QUERY, weight)


def test_groups_that_do_not_divide_are_refused_by_name():
    with pytest.raises(ModelError, match=r"q_proj\.weight: has 384 columns, which groups of 100"):
        sent(section_of("int4", 100, []), QUERY, weights_of())


def test_experts_in_one_tensor_are_refused():
    with pytest.raises(ModelError, match="all experts of a layer"):
        sent(BLOCK_FP8, "model.layers.0.mlp.experts.gate_up_proj", torch.zeros(4, 6, 8))


@pytest.mark.parametrize(
    ("section", "what"),
    [
        ({"quant_method": "awq"}, "quant_method 'awq'"),
        ({"quant_method": "fp8", "activation_scheme": "static"}, "activation_scheme 'static'"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt 'e5m2'"),
        (compressed({"num_bits": 8, "type": "int", "symmetric": True}, "int-quantized"), "type int, 8 bits"),
        (compressed({"num_bits": 4, "type": "int", "symmetric": False}, "pack-quantized"), "symmetric False"),
        ({"quant_method": "compressed-tensors"}, "without config_groups"),
    ],
)
def test_what_is_not_supported_is_refused_with_what_is(section, what):
    with pytest.raises(
        ModelError, match=f"{what}.* is not supported(.|\n)*supported are block and per-tensor FP8"
    ):
        quantiser_of(config(section))

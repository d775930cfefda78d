import pytest

from slime.errors import ModelError
from slime.train.flops import Experts, LatentAttention, ModelShape, SampleFlops, shape_of_config

SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 131,
}
ROUTED = {"num_experts_per_tok": 2, "moe_intermediate_size": 40}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "n_routed_experts": 4,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
QWEN_MOE = {"shared_expert_intermediate_size": 56, "num_experts": 4, "mlp_only_layers": [0]}
# The number: matmul FLOPs a token that the formula leaves out, of routers and of a shared expert's gate.
MODELS = {
    "llama": (SIZES, 0),
    "qwen3": (SIZES | {"head_dim": 24}, 0),
    "mixtral": (SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2}, 3 * 2 * 64 * 4),
    "qwen2_moe": (SIZES | ROUTED | QWEN_MOE, 2 * 2 * 64 * (4 + 1)),
    "deepseek_v3": (SIZES | ROUTED | LATENT, 2 * 2 * 64 * 4),
    "deepseek_v3 without query compression": (
        SIZES | ROUTED | LATENT | {"q_lora_rank": None},
        2 * 2 * 64 * 4,
    ),
}


def counted_flops(kind, config, length):
    """What torch counts in a forward pass with attention that computes the masked half too."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(kind.split()[0], **config),
        attn_implementation="eager",
        experts_implementation="eager",
    )
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.ones(1, length, dtype=torch.long))
    return counter.get_total_flops()


@pytest.mark.parametrize("kind", MODELS)
def test_the_formula_is_what_torch_counts_in_the_real_model(kind):
    config, left_out = MODELS[kind]
    flops = shape_of_config(config).sample_flops()
    for length in (16, 48):
        both_halves = flops(length) + flops.quadratic * length**2
        assert counted_flops(kind, config, length) == both_halves + left_out * length


def test_attention_is_quadratic_in_the_sample_and_the_rest_linear():
    flops = SampleFlops(linear=10, quadratic=3)
    assert [flops(0), flops(1), flops(2), flops(100)] == [0, 13, 32, 31000]


def test_dense_layers_of_a_routed_model_keep_the_plain_feed_forward():
    dense = ModelShape(layers=4, hidden=8, heads=2, kv_heads=2, head_dim=4, ffn=32, vocabulary=16)
    experts = Experts(ffn=4, per_token=2, shared_ffn=4, dense_layers=1)
    routed = ModelShape(
        layers=4, hidden=8, heads=2, kv_heads=2, head_dim=4, ffn=32, vocabulary=16, experts=experts
    )
    saved = 6 * 8 * 3 * (32 - 12)
    assert dense.sample_flops().linear - routed.sample_flops().linear == saved
    assert dense.sample_flops().quadratic == routed.sample_flops().quadratic


def test_latent_attention_costs_pairs_by_the_sizes_of_its_keys_and_values():
    latent = LatentAttention(
        q_lora_rank=None, kv_lora_rank=6, qk_nope_head_dim=5, qk_rope_head_dim=3, v_head_dim=7
    )
    shape = ModelShape(
        layers=2, hidden=8, heads=2, kv_heads=2, head_dim=4, ffn=32, vocabulary=16, latent=latent
    )
    assert shape.sample_flops().quadratic == 2 * 2 * (5 + 3 + 7)


def test_the_text_part_of_a_multimodal_config_is_read():
    assert shape_of_config({"text_config": SIZES, "vision_config": {}}) == shape_of_config(SIZES)


def test_a_missing_size_is_named():
    with pytest.raises(ModelError, match="intermediate_size is None"):
        shape_of_config({name: size for name, size in SIZES.items() if name != "intermediate_size"})

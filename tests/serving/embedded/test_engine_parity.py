"""The engine's tokens and log-probs are those of the model's plain forward."""

import random

import pytest
import torch
from safetensors.torch import load_file

from slime.errors import ModelError
from tests.serving.embedded.harness import generate, one, plain_logprobs, request, running
from tests.tiny import tiny_model_dir

# A window of 8 is shorter than every prompt below, so that sliding layers really slide.
ARCHITECTURES = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"tie_word_embeddings": True},
    "mistral": {"sliding_window": 8},
    "gemma2": {"sliding_window": 8, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 2.0},
    "gemma3_text": {"sliding_window": 8, "query_pre_attn_scalar": 16},
    "olmo2": {},
    "phi3": {},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
}


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_continuous_batch_equals_plain_forward(arch, tmp_path):
    folder = tiny_model_dir(tmp_path / arch, arch=arch, initializer_range=0.2, **ARCHITECTURES[arch])
    rng = random.Random(arch)
    prompts = [[rng.randrange(3, 259) for _ in range(length)] for length in (1, 9, 40, 300, 17)]
    with running(folder, chunked_prefill_size=64, max_running_requests=3) as engine:
        updates = generate(engine, [request(p, score=0, max_new_tokens=6 + i) for i, p in enumerate(prompts)])
    for prompt, update in zip(prompts, updates, strict=True):
        expected = plain_logprobs(folder, prompt + update.output_ids)
        for i, (token, logprob) in enumerate(zip(update.output_ids, update.output_logprobs, strict=True)):
            row = expected[len(prompt) - 1 + i]
            assert abs(row[token].item() - logprob) < 1e-4
            assert row.max().item() - row[token].item() < 1e-4
        assert [token for _, token in update.input_logprobs] == prompt
        assert update.input_logprobs[0][0] is None
        for position, (logprob, token) in enumerate(update.input_logprobs[1:]):
            assert abs(expected[position, token].item() - logprob) < 1e-4


def test_sampled_logprobs_are_those_of_the_tempered_distribution(tmp_path):
    folder = tiny_model_dir(tmp_path / "m", initializer_range=0.2)
    prompt = list(range(20, 60))
    with running(folder) as engine:
        update = one(
            engine, prompt, greedy=False, temperature=0.7, top_p=0.8, top_k=50, sampling_seed=3, top=3
        )
    logits = plain_logprobs(folder, prompt + update.output_ids)
    rows = (logits / 0.7).log_softmax(-1)[len(prompt) - 1 : -1]
    for row, token, logprob, top in zip(
        rows, update.output_ids, update.output_logprobs, update.output_top_logprobs, strict=True
    ):
        assert abs(row[token].item() - logprob) < 1e-4
        assert [i for _, i in top] == row.topk(3).indices.tolist()
        assert max(abs(row[i].item() - value) for value, i in top) < 1e-4


def test_sequences_grow_through_length_classes(tmp_path):
    folder = tiny_model_dir(tmp_path / "m", initializer_range=0.2)
    prompts = [list(range(10, 10 + length)) for length in (3, 50, 200)] + [list(range(3, 253))]
    with running(folder) as engine:
        updates = generate(engine, [request(p, max_new_tokens=300) for p in prompts])
    for prompt, update in zip(prompts, updates, strict=True):
        expected = plain_logprobs(folder, prompt + update.output_ids)[len(prompt) - 1 : -1]
        gaps = [
            abs(r[t].item() - lp)
            for r, t, lp in zip(expected, update.output_ids, update.output_logprobs, strict=True)
        ]
        assert max(gaps) < 1e-4


def test_bfloat16_serves(tmp_path):
    folder = tiny_model_dir(tmp_path / "m")
    with running(folder, dtype="bfloat16") as engine:
        update = one(engine, range(20, 40))
    expected = plain_logprobs(folder, [*range(20, 40), *update.output_ids])[19:-1]
    gaps = [
        abs(r[t].item() - lp)
        for r, t, lp in zip(expected, update.output_ids, update.output_logprobs, strict=True)
    ]
    assert max(gaps) < 0.1


def test_missing_folder_is_refused(tmp_path):
    with pytest.raises(ModelError, match=r"not a model folder[\s\S]*remedy"), running(tmp_path / "nowhere"):
        pass


def test_folder_without_weights_is_refused(tmp_path):
    folder = tiny_model_dir(tmp_path / "m")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="cannot load the model"), running(folder):
        pass


def test_pickled_weights_are_not_read(tmp_path):
    folder = tiny_model_dir(tmp_path / "m")
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"cannot load the model[\s\S]*remedy.*safetensors"), running(folder):
        pass


def test_attention_sinks_are_refused(tmp_path):
    options = {"num_local_experts": 2, "num_experts_per_tok": 1, "initializer_range": 0.0}
    folder = tiny_model_dir(tmp_path / "m", arch="gpt_oss", **options)
    with pytest.raises(ModelError, match="attention sinks") as caught, running(folder):
        pass
    assert str(folder) in str(caught.value)


def test_key_and_value_heads_of_different_size_are_refused(tmp_path):
    heads = {"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "head_dim": 8, "v_head_dim": 16}
    ranks = {"num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 16, "first_k_dense_replace": 2}
    folder = tiny_model_dir(tmp_path / "m", arch="deepseek_v3", **heads, **ranks)
    with pytest.raises(ModelError, match="between keys and values"), running(folder):
        pass


def test_recurrent_architecture_is_refused(tmp_path):
    options = {
        "linear_num_value_heads": 2,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 16,
        "num_experts": 2,
    }
    folder = tiny_model_dir(
        tmp_path / "m", arch="qwen3_next", linear_value_head_dim=16, num_hidden_layers=4, **options
    )
    with pytest.raises(ModelError, match="cannot run this architecture"), running(folder):
        pass


def test_mask_that_the_kernel_is_not_told_is_refused(tmp_path):
    folder = tiny_model_dir(tmp_path / "m", arch="bloom", n_head=4, n_layer=2)
    with pytest.raises(ModelError), running(folder):
        pass

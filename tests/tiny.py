"""Random tiny models with a byte-level tokenizer and a chat template, for tests."""

from pathlib import Path

from slime.contracts.tokenizer import byte_tokenizer


def tiny_tokenizer():
    """A tokenizer with one token a byte (ids 3-258) behind three special tokens; `<|im_end|>` ends."""
    return byte_tokenizer()


def tiny_model(arch: str = "llama", seed: int = 0, **overrides):
    """A random float32 causal model: vocabulary 259, hidden 64, 2 layers, 4 heads, 2 key-value heads."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = {
        "vocab_size": 259,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 1024,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "bos_token_id": None,
        "tie_word_embeddings": False,
    }
    config = AutoConfig.for_model(arch, **(shape | overrides))
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def tiny_model_dir(path: Path, *, arch: str = "llama", seed: int = 0, **overrides) -> Path:
    """Write model and tokenizer below `path` and return it."""
    path.mkdir(parents=True, exist_ok=True)
    tiny_model(arch, seed, **overrides).save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path

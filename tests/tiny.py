"""Random tiny models with a byte-level tokenizer and a chat template, for tests."""

from pathlib import Path

CHAT_TEMPLATE = (
    "{% for m in messages %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def tiny_tokenizer():
    """A tokenizer with one token a byte (ids 3-258) behind three special tokens; `<|im_end|>` ends."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(SPECIAL + alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


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

"""A random causal model small enough for checks of the arithmetic, as a Hugging Face folder.

Invariant: the same seed writes the same weights. Knows no checks and no flags.
"""

from __future__ import annotations

from pathlib import Path

VOCABULARY = 64
_CONTEXT = 512


def write_tiny_model(folder: Path, *, seed: int = 0) -> None:
    """Write a Llama of one layer and width 16 over `VOCABULARY` tokens, and a tokenizer of a word a token."""
    import torch
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    from transformers.utils import logging

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=_CONTEXT,
    )
    logging.disable_progress_bar()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        LlamaForCausalLM(config).save_pretrained(folder)
    words = WordLevel({str(token): token for token in range(VOCABULARY)}, unk_token="0")
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), eos_token="2").save_pretrained(folder)

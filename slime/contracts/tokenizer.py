"""A byte-level tokenizer with a chat template that is made and not downloaded, for checks without a model.

Invariant: one token a byte behind three special ones; every text comes back as it was.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_TEMPLATE = (
    "{% for m in messages %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def byte_tokenizer() -> Any:
    """A fast tokenizer of transformers: ids 3 to 258 are bytes, ``<|im_end|>`` (2) ends an answer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*SPECIAL, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=SPECIAL[2], pad_token=SPECIAL[0])
    fast.chat_template = _TEMPLATE
    return fast


def write_byte_tokenizer(folder: Path) -> Path:
    """Write it as a Hugging Face folder and return that."""
    byte_tokenizer().save_pretrained(folder)
    return folder

"""The model of the tests on real servers: random weights, but behind a newline it calls a tool.

A prompt that ends with the header of an assistant's turn is answered by `ANSWER`, greedily and at any
temperature; any other as by a random model. That is a chain of tokens: the embedding of each is a direction
of its own, that nothing else in the residual stream has, and the output layer turns it into the next.
"""

import itertools
import shutil
from pathlib import Path

from tests.agent.templates import family_tokenizer
from tests.tiny import tiny_model_dir

REASONING = "I need the file."
CALL = '{"name": "read", "arguments": {"path": "a.txt"}}'
ANSWER = (
    "<think>",
    f"\n{REASONING}\n",
    "</think>",
    "\n\n<tool_call>",
    f"\n{CALL}\n",
    "</tool_call>",
    "<|im_end|>",
)
LENGTH = 1000.0
SHARPNESS = 10.0


def sglang_tokenizer(folder):
    """A byte tokenizer with Qwen3's template, and a token for each piece of the answer that has none."""
    from transformers import AutoTokenizer

    family_tokenizer("qwen3").save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    known = tokenizer.get_vocab()
    tokenizer.add_tokens([piece for piece in ANSWER if piece not in known])
    return tokenizer


def write_model(folder: Path) -> Path:
    """Write model and tokenizer as a Hugging Face folder, and return that."""
    import torch
    from safetensors.torch import load_file, save_file

    tokenizer = sglang_tokenizer(folder.with_suffix(".tokenizer"))
    shape = {"hidden_size": 128, "num_hidden_layers": 4, "vocab_size": len(tokenizer), "eos_token_id": 2}
    tiny_model_dir(folder, arch="qwen3", **shape)
    tokenizer.save_pretrained(folder)
    shutil.rmtree(folder.with_suffix(".tokenizer"))
    chain = [tokenizer.convert_tokens_to_ids(piece) for piece in ANSWER]
    chain.insert(0, tokenizer.encode("\n", add_special_tokens=False)[0])
    assert None not in chain
    weights = load_file(folder / "model.safetensors")
    embedding, output = weights["model.embed_tokens.weight"], weights["lm_head.weight"]
    links = len(chain) - 1
    with torch.no_grad():
        embedding[:, :links] = output[:, :links] = 0
        for name, weight in weights.items():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight[:links] = 0
        for direction, (token, following) in enumerate(itertools.pairwise(chain)):
            embedding[token] = 0
            embedding[token, direction] = LENGTH
            output[following, direction] = SHARPNESS
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder

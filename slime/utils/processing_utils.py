"""Loading of tokenizers, with errors that name the folder and the flag.

transformers is imported at the first call only.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from slime.errors import ModelError

FLAG = "--hf-checkpoint"


def load_tokenizer(path: str | Path | None, **kwargs: Any) -> Any:
    """The tokenizer of a Hugging Face folder (or of a model name that transformers knows).

    Args:
        kwargs: for ``AutoTokenizer.from_pretrained``.

    Raises:
        ModelError: no path, no such folder, or no usable tokenizer in it.
    """
    if not path:
        raise ModelError("a tokenizer is needed, but no model is given", place=FLAG, remedy=f"set {FLAG}")
    folder = Path(path).expanduser()
    looks_local = folder.is_absolute() or str(path).startswith(".") or len(folder.parts) > 2
    if looks_local and not folder.is_dir():
        raise ModelError(
            f"{path} is not a folder", place=FLAG, remedy="give the folder that holds config.json"
        )
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(folder if folder.is_dir() else path), **kwargs)
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise ModelError(
            f"{path} has no tokenizer that loads: {type(error).__name__}: {str(error).strip()[:500]}",
            place=FLAG,
            remedy="the folder needs tokenizer.json or the files of a slow tokenizer",
        ) from error

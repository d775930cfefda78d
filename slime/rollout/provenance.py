"""Where results come from: everything that, were it different, would make them other results.

Invariant: equal provenance means that results may be joined. Plain values for JSON; files and tokenizers
enter by digest. Knows nothing of how results are kept.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import slime
from slime.config.sections import RewardConfig
from slime.utils.data_files import split_slice

_ENDS = 1 << 20
_COSTS_ONLY = ("custom_rm_path", "reward_timeout", "reward_num_workers", "judge_api_key_env")
"""Reward flags that stand among the hooks, or change no reward."""
_REWARD = tuple(item.name for item in dataclasses.fields(RewardConfig) if item.name not in _COSTS_ONLY)
_SHAPES_ROLLOUTS = ("custom_generate_function_path", "rollout_sample_hook_path", "custom_rm_path")


def provenance(
    args: Any, engine: Mapping[str, Any], tokenizer: Any, data_sets: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """The provenance of results.

    Args:
        args: the flags; hooks and rewards are read from it.
        engine: its ``/model_info``.
        tokenizer: None where hooks need none.
        data_sets: name -> ``path`` and whatever else shapes its rollouts, such as sampling parameters.
    """
    return {
        "slime": slime.__version__,
        "model": engine.get("model_path"),
        "model_files": _model_digest(engine.get("model_path")),
        "weight_version": engine.get("weight_version"),
        "tokenizer": tokenizer_digest(tokenizer),
        "chat_template": digest(json.dumps(getattr(tokenizer, "chat_template", None), sort_keys=True)),
        "seed": getattr(args, "rollout_seed", None),
        "hooks": {dest: getattr(args, dest, None) for dest in _SHAPES_ROLLOUTS},
        "reward": {name: getattr(args, name, None) for name in _REWARD} | {"judge_rubric": _rubric(args)},
        "data": {
            name: {**values, "sha256": file_digest(values.get("path"))} for name, values in data_sets.items()
        },
    }


def _rubric(args: Any) -> str | None:
    """The judge's rubric: its text, or the digest of its file."""
    rubric: str | None = getattr(args, "judge_rubric", None)
    return file_digest(rubric) if rubric and Path(rubric).is_file() else rubric


def digest(text: str) -> str:
    """SHA-256 of a text, in hexadecimal."""
    return hashlib.sha256(text.encode()).hexdigest()


def file_digest(path: str | None) -> str | None:
    """SHA-256 of a file's content, a slice left aside; None without a path."""
    if path is None:
        return None
    with split_slice(path)[0].open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def tokenizer_digest(tokenizer: Any) -> str | None:
    """Digest of what a tokenizer does: of its whole description, or of its vocabulary where it has none."""
    if tokenizer is None:
        return None
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        return digest(backend.to_str())
    return digest(json.dumps(sorted(tokenizer.get_vocab().items())))


def _model_digest(path: str | None) -> str | None:
    """Digest of a model folder: its configuration, and both ends of each weight file; None elsewhere.

    Whole weights would take minutes to read; training changes the ends too.
    """
    folder = Path(path or "")
    if not path or not (folder / "config.json").is_file():
        return None
    whole = hashlib.sha256((folder / "config.json").read_bytes())
    for file in _weight_files(folder):
        size = file.stat().st_size
        whole.update(f"{file.name}:{size}".encode())
        with file.open("rb") as content:
            whole.update(content.read(_ENDS))
            content.seek(max(0, size - _ENDS))
            whole.update(content.read(_ENDS))
    return whole.hexdigest()


def _weight_files(folder: Path) -> Iterable[Path]:
    return sorted([*folder.glob("*.safetensors"), *folder.glob("*.bin")])

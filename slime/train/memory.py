"""What training needs of memory, estimated before a model loads.

Invariant: what is held at once, in bytes; parts that never are together are not added up.
Reads a model folder's config and the headers of its weights; loads nothing, and knows no trainer.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from slime.config.training_sections import TrainConfig
from slime.errors import ModelError
from slime.train.flops import ModelShape, shape_of_config

_FLOAT = 4
# Holes of the heap and buffers of matrix products, as measured by tests/train/test_memory.py.
_HEAP = 1.2
_LOGIT_BYTES = 256 * 2**20
Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """Bytes of a trainer's process, besides Python and its libraries.

    Attributes:
        weights: float32 masters, copies in the compute dtype, a frozen reference, merged weights of adapters.
        gradients: of what trains; of all weights, twice more for the embedding while it is summed up.
        optimizer: AdamW's two moments.
        activations: what the backward of one micro-batch of `tokens` tokens needs.
        logits: those held at once.
        loading: the models while they are read, which each of several train processes holds whole.
        processes: over which weights, gradients and moments are spread.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    tokens: int
    loading: int = 0
    processes: int = 1

    @property
    def total(self) -> int:
        """All of it, and a fifth for holes of the heap."""
        parts = self.weights + self.gradients + self.optimizer + self.activations + self.logits
        return int(_HEAP * max(parts, self.loading))

    def line(self) -> str:
        """As the plan shows it."""
        parts = ("weights", "gradients", "optimizer", "activations", "logits")
        shown = ", ".join(f"{name} {_gib(getattr(self, name))}" for name in parts)
        each = f" in each of {self.processes} processes" if self.processes > 1 else ""
        return f"about {_gib(self.total)} GiB{each} ({shown}) with {self.tokens:,} tokens in a micro-batch"


def estimate_memory(
    folder: Path, train: TrainConfig, *, has_reference: bool, longest_row: int | None
) -> MemoryEstimate:
    """Estimate for a Hugging Face folder.

    Args:
        has_reference: a second, frozen model is held.
        longest_row: most tokens of a sample; None where nothing bounds it.

    Raises:
        ModelError: the folder does not say what the formulas need, or nothing bounds a micro-batch.
    """
    shapes = weight_shapes(folder)
    shape = shape_of_config(_read_config(folder))
    tokens = micro_batch_tokens(train, longest_row)
    half = train.train_precision == "bfloat16"
    count = sum(map(math.prod, shapes.values()))
    adapted = _adapted(shapes, train, shape.vocabulary) if train.lora_rank else {}
    adapters = train.lora_rank * sum(map(sum, adapted.values()))
    merged = sum(map(math.prod, adapted.values()))
    trained = adapters if train.lora_rank else count
    ranks, ends = train.actor_num_gpus_per_node, 2 * shape.vocabulary * shape.hidden
    gathered = ends if ranks > 1 else 0
    chunk = train.log_probs_chunk_size if train.log_probs_chunk_size > 0 else default_chunk(shape.vocabulary)
    return MemoryEstimate(
        weights=(_FLOAT * (count * (1 + has_reference) + adapters + merged) + 2 * half * count) // ranks
        + _FLOAT * gathered,
        gradients=_FLOAT * (trained // ranks if train.lora_rank else trained // ranks + ends),
        optimizer=2 * _FLOAT * trained // ranks,
        activations=activation_bytes(shape, tokens, half=half, recompute=train.gradient_checkpointing),
        logits=(_FLOAT + 2 * half) * shape.vocabulary * min(chunk, tokens),
        tokens=tokens,
        loading=_FLOAT * count * (1 + has_reference) if ranks > 1 else 0,
        processes=ranks,
    )


def activation_bytes(shape: ModelShape, tokens: int, *, half: bool, recompute: bool) -> int:
    """What autograd keeps of a decoder with gated feed-forward and RMS norms, as counted on a Llama.

    A layer keeps, for a token: six rows of its width in float32 (input, two norms, the sums), and in the
    compute dtype 4 of the queries' width, 3 of the keys', and 4 of the feed-forward's. With `recompute` all
    layers keep their input, and one at a time the rest.
    """
    size = 2 if half else _FLOAT
    attention = 4 * shape.heads * shape.head_dim + 3 * shape.kv_heads * shape.head_dim
    layer = 6 * _FLOAT * shape.hidden + size * attention
    body = shape.layers * layer + 4 * size * shape.ffn_of_all_layers()
    if recompute:
        body = shape.layers * _FLOAT * shape.hidden + body // shape.layers
    return tokens * (body + 3 * _FLOAT * shape.hidden)


def micro_batch_tokens(train: TrainConfig, longest_row: int | None) -> int:
    """Most tokens that are computed together: the budget, or a row that is longer, or rows of the longest.

    Raises:
        ModelError: nothing bounds it.
    """
    if train.use_dynamic_batch_size and train.max_tokens_per_gpu is not None:
        return max(train.max_tokens_per_gpu, longest_row or 0)
    if longest_row is None:
        raise ModelError("no flag bounds the tokens of a micro-batch", place="--rollout-max-context-len")
    return longest_row * max(train.micro_batch_size, 1 if train.tree_batches == "off" else 2)


def default_chunk(vocabulary: int) -> int:
    """Positions whose float32 logits take 256 MiB."""
    return max(64, _LOGIT_BYTES // (4 * vocabulary))


def weight_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Shapes by name, from the headers of the safetensors files; tied weights once.

    Raises:
        ModelError: no such files, or one that does not read.
    """
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        files = sorted({folder / name for name in json.loads(index.read_text())["weight_map"].values()})
    else:
        files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelError("there are no safetensors files", place=str(folder))
    return {name: shape for file in files for name, shape in _header(file).items()}


def _header(file: Path) -> dict[str, tuple[int, ...]]:
    try:
        with file.open("rb") as stream:
            entries = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
        return {name: tuple(entry["shape"]) for name, entry in entries.items() if name != "__metadata__"}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"is not a safetensors file: {error}", place=str(file)) from error


def _read_config(folder: Path) -> dict[str, object]:
    try:
        config: dict[str, object] = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise ModelError(f"config.json does not read: {error}", place=str(folder)) from error
    return config


def _adapted(shapes: Shapes, train: TrainConfig, vocabulary: int) -> dict[str, tuple[int, ...]]:
    """Matrices with an adapter; embedding, output layer and routed experts have none."""
    targets = train.lora_target_modules
    return {
        name: shape
        for name, shape in shapes.items()
        if len(shape) == 2
        and shape[0] != vocabulary
        and ".experts." not in name
        and (targets == ["all-linear"] or name.removesuffix(".weight").endswith(tuple(targets)))
    }


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f}"

"""Loading a Hugging Face causal model for packed attention, with the proof at load that it may be used so.

Invariant: what `load_model` returns gave, on packed rows of prefill and decode, the log-probs of the model's
own eager forward; every other architecture is refused with a reason. Knows nothing of requests or scheduling.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from slime.errors import ModelError
from slime.serving.embedded.attention import (
    ATTENTION,
    AttentionOptions,
    DecodeGroup,
    ForwardBatch,
    PrefillSpan,
    packed_attention,
)
from slime.serving.embedded.kv_cache import KVCache, KVShape
from slime.serving.embedded.model_runner import ModelRunner
from slime.serving.weights.quantise.load import from_folder

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.25}
"""Largest mean difference of log-probs between packed and eager forward."""
LAYER_TYPES = {"full_attention", "sliding_attention"}
GROWING_ROPE = {"dynamic", "longrope"}
"""Rotary scalings whose angles depend on the longest position of the batch."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to serve."""

    runner: ModelRunner
    config: Any
    tokenizer: Any
    kv_shape: KVShape
    eos_ids: frozenset[int]
    context_length: int


def load_model(model_path: str, dtype: torch.dtype) -> LoadedModel:
    """Load model, tokenizer and end-of-text ids from a folder.

    Raises:
        ModelError: the folder is missing or broken, or packed attention does not fit the architecture.
    """
    folder = Path(model_path)
    if not (folder / "config.json").is_file():
        raise ModelError(
            "not a model folder (no config.json)",
            place=model_path,
            remedy="give a folder in Hugging Face format; `slime convert` makes one from a GGUF file",
        )
    AttentionInterface.register(ATTENTION, packed_attention)
    try:
        config = AutoConfig.from_pretrained(model_path, local_files_only=True)
        _refuse_layers(config.get_text_config(), model_path)
        tokenizer = AutoTokenizer.from_pretrained(model_path, local_files_only=True)
        model = from_folder(
            AutoModelForCausalLM,
            model_path,
            config,
            dtype=dtype,
            attn_implementation=ATTENTION,
            local_files_only=True,
            use_safetensors=True,
        )
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ModelError(
            f"cannot load the model: {error}",
            place=model_path,
            remedy="the folder must hold config, tokenizer and safetensors weights of a causal language "
            "model; pickled weights (.bin) are never read",
        ) from error
    model.eval().requires_grad_(False)
    runner = ModelRunner(model)
    with torch.inference_mode():
        shape = _probe(runner, dtype, model_path)
        _compare_with_eager(runner, shape, model_path)
    return LoadedModel(
        runner, config, tokenizer, shape, _eos_ids(folder, config, tokenizer), _context_length(config)
    )


def _unsupported(reason: str, place: str) -> ModelError:
    return ModelError(
        f"the embedded engine cannot run this architecture: {reason}",
        place=place,
        remedy="use a decoder with full or sliding-window attention (Llama, Qwen, Gemma, ...), or SGLang",
    )


def _refuse_layers(config: Any, place: str) -> None:
    """Refuse layers whose state is not keys and values, or whose mask is told by no argument."""
    others = set(getattr(config, "layer_types", None) or ()) - LAYER_TYPES
    if others:
        raise _unsupported(f"it has layers of type {', '.join(sorted(others))}", place)
    if getattr(config, "attention_chunk_size", None):
        raise _unsupported("it has chunked attention", place)


class _Probe:
    """Stands in for a batch and records what each layer asks for."""

    def __init__(self) -> None:
        self.shapes: dict[int, tuple[int, int]] = {}
        self.windows: dict[int, int | None] = {}
        self.value_dim: set[int] = set()

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> Tensor:
        """Any output of the right shape."""
        self.shapes[layer] = (key.shape[1], key.shape[2])
        self.windows[layer] = options.window
        self.value_dim.add(value.shape[2])
        return torch.zeros(query.shape[0], query.shape[1], value.shape[2], dtype=query.dtype)


def _probe(runner: ModelRunner, dtype: torch.dtype, place: str) -> KVShape:
    """Find layers, key-value heads and head size by a forward of one token."""
    probe = _Probe()
    try:
        runner.forward(probe, [0], [0], [0])
    except ModelError as error:
        raise _unsupported(error.message, place) from error
    layers, shapes = sorted(probe.shapes), set(probe.shapes.values())
    if not layers or layers != list(range(len(layers))):
        raise _unsupported(f"attention was reached in layers {layers} only", place)
    if len(shapes) != 1 or probe.value_dim != {dim for _, dim in shapes}:
        raise _unsupported("heads differ between layers, or between keys and values", place)
    types = getattr(runner.model.config.get_text_config(), "layer_types", None) or []
    blind = [i for i, kind in enumerate(types) if kind == "sliding_attention" and probe.windows[i] is None]
    if blind:
        raise _unsupported(f"layer {blind[0]} does not tell its attention function the window", place)
    heads, dim = shapes.pop()
    return KVShape(len(layers), heads, dim, dtype)


def _compare_with_eager(runner: ModelRunner, shape: KVShape, place: str) -> None:
    """Prefill in two chunks beside another prompt, decode one token, and compare with eager attention."""
    vocab = runner.model.get_input_embeddings().num_embeddings
    first, second = ([(7 * i + offset) % vocab for i in range(count)] for count, offset in ((7, 3), (5, 11)))
    packed = _packed_logits(runner, shape, first, second).log_softmax(-1)
    runner.model.set_attn_implementation("eager")
    try:
        eager = [
            runner.model(torch.tensor([ids])).logits[0].float().log_softmax(-1) for ids in (first, second)
        ]
    except (TypeError, ValueError, RuntimeError) as error:
        raise _unsupported(f"its eager forward failed ({error})", place) from error
    finally:
        runner.model.set_attn_implementation(ATTENTION)
    gap = (packed - torch.cat(eager)).abs().mean().item()
    if not gap < TOLERANCE[shape.dtype]:
        raise _unsupported(f"packed and plain forward differ by {gap:.2g} in the log-probs", place)


def _packed_logits(runner: ModelRunner, shape: KVShape, first: list[int], second: list[int]) -> Tensor:
    """Logits of all positions of both prompts, computed in three packed steps."""
    cut, last = 3, len(first) - 1
    buffer, other = shape.buffer(len(first)), shape.buffer(len(second))
    chunk = runner.forward(
        ForwardBatch([PrefillSpan(buffer, 0, cut)]), first[:cut], list(range(cut)), list(range(cut))
    )
    spans = ForwardBatch([PrefillSpan(buffer, cut, last - cut), PrefillSpan(other, 0, len(second))])
    positions = [*range(cut, last), *range(len(second))]
    both = runner.forward(spans, first[cut:last] + second, positions, list(range(len(positions))))
    cache: KVCache[None] = KVCache(shape, len(first))
    place = cache.add(None, [buffer[:, :, :, :last]])
    group = DecodeGroup(place.arena, torch.tensor([last]), last + 1)
    end = runner.forward(ForwardBatch([group]), first[last:], [last], [0])
    return torch.cat([chunk, both[: last - cut], end, both[last - cut :]])


def _eos_ids(folder: Path, config: Any, tokenizer: Any) -> frozenset[int]:
    """End-of-text ids of generation config (or config) and tokenizer."""
    generation = None
    if (folder / "generation_config.json").is_file():
        generation = GenerationConfig.from_pretrained(folder, local_files_only=True).eos_token_id
    found = generation if generation is not None else getattr(config.get_text_config(), "eos_token_id", None)
    ids = set(found) if isinstance(found, list) else {found}
    return frozenset(i for i in ids | {tokenizer.eos_token_id} if i is not None)


def _context_length(config: Any) -> int:
    """Positions of the model; where rotary angles grow with the batch, only those before the growth."""
    text = config.get_text_config()
    length = int(getattr(text, "max_position_embeddings", None) or 2**20)
    rope = getattr(text, "rope_parameters", None) or {}
    if rope.get("rope_type") in GROWING_ROPE:
        length = min(length, int(rope.get("original_max_position_embeddings") or length))
    return length

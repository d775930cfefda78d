"""What a checkpoint's `quantization_config` says: which weights are quantised, and how.

Invariant: a config that cannot be followed exactly is refused by the key that asks for it, never
approximated. Knows config keys and module names; knows no tensors.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from slime.errors import ModelError

Granularity: TypeAlias = Literal["block", "channel", "tensor"]
SUPPORTED = (
    "block and per-tensor FP8 (quant_method fp8), and compressed-tensors with FP8 (block, channel, tensor) "
    "or symmetric INT4 (pack-quantized, group or channel) weights"
)
_NEVER = frozenset({"gate", "router", "shared_expert_gate", "embed_tokens", "wte", "word_embeddings"})
"""Last parts of module names that are no linear layers in checkpoints, whatever a config lists."""
_HEADS = ("lm_head", "head")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8:
    """Codes in float8 e4m3, and what to multiply them by.

    Attributes:
        block: rows and columns with one scale, for granularity ``block``.
        scale: last part of the scale's name.
        scale_dtype: name of its torch dtype.
        power_of_two: scales are powers of two (``scale_fmt: ue8m0``).
    """

    granularity: Granularity
    scale: str
    block: tuple[int, int] | None = None
    scale_dtype: str = "float32"
    power_of_two: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Int4:
    """Signed four-bit codes, eight in an int32, with a scale for `group_size` columns; None: a row."""

    group_size: int | None
    scale_dtype: str


Scheme: TypeAlias = Fp8 | Int4


@dataclass(frozen=True, slots=True)
class Rule:
    """Modules, as a config names them, and their scheme."""

    targets: tuple[str, ...]
    scheme: Scheme


@dataclass(frozen=True, slots=True)
class Quantisation:
    """A whole config."""

    rules: tuple[Rule, ...]
    ignored: tuple[str, ...]

    def scheme_of(self, module: str, *, linear: bool) -> Scheme | None:
        """How the weight of a module is stored; None is as it is.

        Args:
            linear: the module is a linear layer, which a target ``Linear`` means.
        """
        if any(matches(pattern, module) for pattern in self.ignored):
            return None
        for rule in self.rules:
            if any((linear and t == "Linear") or matches(t, module) for t in rule.targets):
                return rule.scheme
        return None


def is_head(module: str) -> bool:
    """Whether the module is an output layer, by its name."""
    return module.rpartition(".")[2] in _HEADS


def is_linear(module: str, shape: Sequence[int]) -> bool:
    """Whether the weight of this name and shape is a linear layer's, by what checkpoints call the others."""
    return len(shape) == 2 and module.rpartition(".")[2] not in _NEVER


def quantisation_of(config: Mapping[str, Any], place: str = "config.json") -> Quantisation | None:
    """What a Hugging Face config says; None where its weights are stored as they are.

    Raises:
        ModelError: a method or an option that is not supported.
    """
    section = config.get("quantization_config") or config.get("compression_config")
    if section is None:
        return None
    method = section.get("quant_method")
    if method == "fp8":
        return _fp8(section, place)
    if method == "compressed-tensors":
        return _compressed(section, _dtype_of(config), place)
    raise _unsupported(f"quant_method {method!r}", place)


def _fp8(section: Mapping[str, Any], place: str) -> Quantisation:
    _require(section, "fmt", (None, "e4m3"), place)
    _require(section, "activation_scheme", (None, "dynamic"), place)
    _require(section, "scale_fmt", (None, "float", "ue8m0"), place)
    block = section.get("weight_block_size")
    ignored = section.get("modules_to_not_convert") or section.get("ignored_layers") or ()
    scheme = Fp8(
        granularity="tensor" if block is None else "block",
        scale="weight_scale" if block is None else "weight_scale_inv",
        block=None if block is None else _block(block, place),
        power_of_two=section.get("scale_fmt") == "ue8m0",
    )
    return Quantisation((Rule(("Linear",), scheme),), (*ignored, *_HEADS))


def _compressed(section: Mapping[str, Any], dtype: str, place: str) -> Quantisation:
    for key in ("kv_cache_scheme", "sparsity_config", "transform_config"):
        if section.get(key):
            raise _unsupported(f"{key} of compressed-tensors", place)
    groups = section.get("config_groups") or {}
    if not groups:
        raise _unsupported("compressed-tensors without config_groups", place)
    rules = []
    for name, group in groups.items():
        where = f"{place}, config_groups.{name}"
        form = group.get("format") or section.get("format")
        rules.append(Rule(tuple(group.get("targets") or ()), _group_scheme(group, form, dtype, where)))
    return Quantisation(tuple(rules), tuple(section.get("ignore") or ()))


def _group_scheme(group: Mapping[str, Any], form: str | None, dtype: str, place: str) -> Scheme:
    weights, activations = group.get("weights") or {}, group.get("input_activations")
    if activations and not activations.get("dynamic"):
        raise _unsupported("calibrated input_activations (dynamic false)", place)
    _require(weights, "symmetric", (True,), place)
    _require(weights, "dynamic", (None, False), place)
    kind = (weights.get("type"), weights.get("num_bits"), form)
    if kind == ("float", 8, "float-quantized"):
        return _compressed_fp8(weights, dtype, place)
    if kind == ("int", 4, "pack-quantized"):
        _require(weights, "strategy", ("group", "channel"), place)
        _require(weights, "actorder", (None, False, "weight", "static"), place)
        size = weights.get("group_size") if weights["strategy"] == "group" else None
        return Int4(group_size=size, scale_dtype=dtype)
    raise _unsupported(f"weights of type {kind[0]}, {kind[1]} bits, format {form!r}", place)


def _compressed_fp8(weights: Mapping[str, Any], dtype: str, place: str) -> Fp8:
    _require(weights, "strategy", ("block", "channel", "tensor"), place)
    strategy: Granularity = weights["strategy"]
    block = _block(weights.get("block_structure"), place) if strategy == "block" else None
    return Fp8(granularity=strategy, scale="weight_scale", block=block, scale_dtype=dtype)


def _block(value: Any, place: str) -> tuple[int, int]:
    sizes = value.split("x") if isinstance(value, str) else value
    try:
        rows, columns = (int(size) for size in sizes)
    except (TypeError, ValueError) as error:
        raise _unsupported(f"a block of {value!r}", place) from error
    return rows, columns


def _dtype_of(config: Mapping[str, Any]) -> str:
    """Name of the dtype of the weights that are not quantised, which compressed-tensors gives scales too."""
    inner = config.get("text_config") or {}
    named = config.get("dtype") or config.get("torch_dtype") or inner.get("dtype") or inner.get("torch_dtype")
    return str(named or "bfloat16").removeprefix("torch.")


def matches(pattern: str, module: str) -> bool:
    """Whether a pattern names a module, one above it or the end of its name, or fits it (``re:``)."""
    if pattern.startswith("re:"):
        return re.match(pattern[3:], module) is not None
    return module == pattern or module.startswith(pattern + ".") or module.endswith("." + pattern)


def _require(section: Mapping[str, Any], key: str, allowed: tuple[Any, ...], place: str) -> None:
    if section.get(key) not in allowed:
        raise _unsupported(f"{key} {section.get(key)!r}", place)


def _unsupported(what: str, place: str) -> ModelError:
    return ModelError(f"{what} is not supported", place=place, remedy=f"supported are {SUPPORTED}")

"""The forms that `slime convert` writes weights in, each as the `quantization_config` that says so.

Invariant: what is written here is read back by `quantisation_of`, and by the engines that serve such
checkpoints. Knows configs; knows no tensors and no files.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

FORMS = {
    "none": "weights as they are meant",
    "fp8": "FP8 with a scale a block, as DeepSeek-V3 and Qwen3-FP8",
    "fp8-ue8m0": "the same with scales that are powers of two, as DeepSeek-V3.1",
    "fp8-channel": "FP8 with a scale an output channel (compressed-tensors)",
    "fp8-tensor": "FP8 with one scale a weight (compressed-tensors)",
    "int4": "INT4 with a scale a group of inputs (compressed-tensors, pack-quantized)",
}
DEFAULT_SIZE = 128
_PER_TOKEN = {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True}


def section_of(form: str, size: int, kept: Sequence[str]) -> dict[str, Any] | None:
    """The `quantization_config` of a form; None for ``none``.

    Args:
        size: rows and columns of a block, or inputs of a group.
        kept: names of the linear layers that stay as they are.
    """
    if form == "none":
        return None
    if form in ("fp8", "fp8-ue8m0"):
        section: dict[str, Any] = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [size, size],
            "modules_to_not_convert": list(kept),
        }
        return section | ({"scale_fmt": "ue8m0"} if form == "fp8-ue8m0" else {})
    if form == "int4":
        weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": size}
        return _compressed("pack-quantized", weights, None, kept)
    weights = {"num_bits": 8, "type": "float", "strategy": form.removeprefix("fp8-"), "group_size": None}
    return _compressed("float-quantized", weights, _PER_TOKEN, kept)


def _compressed(
    form: str, weights: dict[str, Any], activations: dict[str, Any] | None, kept: Sequence[str]
) -> dict[str, Any]:
    group = {
        "targets": ["Linear"],
        "weights": weights | {"symmetric": True, "dynamic": False},
        "input_activations": activations,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": list(kept),
        "kv_cache_scheme": None,
    }

"""Loading of a Hugging Face causal model for training.

Invariant: a model that loads here computes, packed, what it computes row by row: that is checked at load.
Master weights are float32. Knows no optimizer and no loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from slime.backends.torch import attention
from slime.backends.torch.forest import PackedBatch, Request, pack_requests
from slime.backends.torch.logprob import Head, LogitOptions, plain_logits, token_log_probs
from slime.errors import ConfigError, ModelError
from slime.serving.weights.quantise.load import from_folder

CHECK_TOLERANCE = 1e-3


@dataclass(frozen=True, slots=True)
class CausalModel:
    """A loaded model: the Hugging Face module, and the dtype of its products."""

    module: Any
    compute_dtype: torch.dtype
    device: torch.device

    @property
    def head(self) -> Head:
        """The output layer. Its weight is not kept: under FSDP it is another tensor inside a forward pass."""
        return _head(self.module)

    def log_probs(
        self, batch: PackedBatch, *, temperature: float, chunk: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probs and entropies, each [T], of the requested targets of a packed batch."""
        hidden = predicting_states(self.module.base_model, batch, self.compute_dtype)
        options = LogitOptions(temperature, chunk, self.compute_dtype)
        log_probs, entropy = token_log_probs(
            hidden, self.head, batch.query_position, batch.query_target, options
        )
        positions = batch.query_position[batch.token_query]
        return log_probs.index_select(0, batch.token_query), entropy.index_select(0, positions)

    def logits(self, batch: PackedBatch) -> torch.Tensor:
        """Logits [T, V] float32 that the requested targets are predicted from, whole and differentiable."""
        hidden = predicting_states(self.module.base_model, batch, self.compute_dtype)
        distinct = plain_logits(hidden, self.head, self.compute_dtype)
        return distinct.index_select(0, batch.query_position[batch.token_query])


def predicting_states(body: Any, batch: PackedBatch, dtype: torch.dtype) -> torch.Tensor:
    """States [P, H], float32, behind the final norm at the positions that predict something."""
    device = batch.input_ids.device
    with torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32):
        output = body(
            input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False, forest=batch.plan
        )
    states: torch.Tensor = output.last_hidden_state[0].index_select(0, batch.hidden_index)
    return states.float()


def load_model(folder: str | Path, *, precision: str = "float32", device: str | None = None) -> CausalModel:
    """Load weights in float32 from a Hugging Face folder.

    Args:
        precision: ``float32``, ``bfloat16`` (autocast), or ``auto``.
        device: e.g. ``cpu``; None is CUDA where there is a GPU, else the CPU.

    Raises:
        ConfigError: no such device here.
        ModelError: no such folder, not a causal language model, weights missing, or an architecture that
            cannot be trained packed.
    """
    path = checked_folder(folder)
    attention.register()
    place = find_device(device)
    module = pretrained(AutoModelForCausalLM, path)
    module.eval()
    module.to(place)
    module.requires_grad_(True)
    model = CausalModel(module, compute_dtype(precision, place), place)
    _check_packing(model, path)
    return model


def pretrained(kind: Any, path: Path) -> Any:
    """The module of an auto class with the weights of a folder, in float32, with attention for packed rows.

    Quantised weights (FP8, INT4) are loaded as what they mean.

    Raises:
        ModelError: not a folder that the class loads, weights missing, or an architecture that cannot be
            packed.
    """
    try:
        config = AutoConfig.from_pretrained(path)
        module, report = from_folder(
            kind,
            path,
            config,
            dtype=torch.float32,
            attn_implementation=attention.NAME,
            output_loading_info=True,
            use_safetensors=True,
        )
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ModelError(
            f"not a causal language model that transformers loads: {_first_line(error)}",
            place=str(path),
            remedy="the folder must hold config and safetensors weights; pickled ones (.bin) are never read",
        ) from error
    missing = sorted(report["missing_keys"])
    if missing:
        raise ModelError(f"{len(missing)} weights are missing, first {missing[0]!r}", place=str(path))
    _refuse_unsupported(module, path)
    return module


def checked_folder(folder: str | Path) -> Path:
    """`folder` as a path.

    Raises:
        ModelError: not a folder with a config.json.
    """
    path = Path(folder).expanduser()
    if not path.is_dir():
        raise ModelError("there is no such model folder", place=str(path), remedy="check --hf-checkpoint")
    if not (path / "config.json").is_file():
        raise ModelError(
            "the folder has no config.json, so it is not a Hugging Face model folder", place=str(path)
        )
    return path


def find_device(name: str | None) -> torch.device:
    """The device of that name; None is CUDA where there is a GPU, else the CPU.

    Raises:
        ConfigError: no such device here.
    """
    wanted = name or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.empty(0, device=wanted).device
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"{wanted!r} cannot be used: {_first_line(error)}", place="device") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"{wanted!r} is neither a CPU nor a CUDA device", place="device")
    return device


def compute_dtype(precision: str, device: torch.device) -> torch.dtype:
    """The dtype of matrix products; `auto` is bfloat16 on CUDA and on CPUs with AMX."""
    if precision == "auto":
        fast = device.type == "cuda" or _has_amx()
        return torch.bfloat16 if fast else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[precision]


def _has_amx() -> bool:
    cpuinfo = Path("/proc/cpuinfo")
    return cpuinfo.is_file() and " amx_bf16" in cpuinfo.read_text()


def _refuse_unsupported(module: Any, path: Path) -> None:
    layers = set(getattr(module.config, "layer_types", None) or ())
    recurrent = sorted(layers - {"full_attention", "sliding_attention"})
    if recurrent:
        raise ModelError(
            f"layers of type {', '.join(recurrent)} cannot be packed",
            place=str(path),
        )
    if not getattr(module, "_supports_attention_backend", False):
        raise ModelError(
            f"{type(module).__name__} does not support exchangeable attention, which packing needs",
            place=str(path),
        )


def _head(module: Any) -> Head:
    layer, config = module.get_output_embeddings(), module.config
    scale = getattr(config, "logit_scale", None) or getattr(config, "lm_head_multiplier", None) or 1.0
    scale /= getattr(config, "logits_scaling", None) or 1.0
    softcap = getattr(config, "final_logit_softcapping", None)
    return Head(layer.weight, layer.bias, scale, softcap)


def probe_rows(vocabulary: int) -> list[tuple[int, ...]]:
    """Three token rows, of which two share a prefix."""
    rows = [tuple((7 * i * i + 3 * i + seed) % vocabulary for i in range(8)) for seed in (1, 2)]
    return [*rows, (*rows[0][:4], *rows[1][4:])]


def _check_packing(model: CausalModel, path: Path) -> None:
    """Compare two packed rows with a common prefix, and a third, with plain forwards of each.

    Raises:
        ModelError: they differ, so the architecture does something that packing breaks.
    """
    rows = probe_rows(model.module.config.vocab_size)
    requests = [Request(row, tuple(range(1, len(row)))) for row in rows]
    exact = CausalModel(model.module, torch.float32, model.device)
    with torch.no_grad():
        try:
            batch = pack_requests(requests, device=model.device)
            packed, _ = exact.log_probs(batch, temperature=1.0, chunk=64)
        except ModelError as error:
            raise ModelError(error.message, place=str(path)) from error
        model.module.set_attn_implementation("sdpa")
        plain = torch.cat([_plain_log_probs(model, row) for row in rows])
        model.module.set_attn_implementation(attention.NAME)
    gap = (packed - plain).abs().max().item()
    if not gap <= CHECK_TOLERANCE:
        raise ModelError(
            f"{type(model.module).__name__} gives other log-probs packed than row by row (up to {gap:.2g}); "
            "the torch trainer does not support the architecture",
            place=str(path),
        )


def _plain_log_probs(model: CausalModel, row: tuple[int, ...]) -> torch.Tensor:
    ids = torch.tensor([row], device=model.device)
    logits: torch.Tensor = model.module(input_ids=ids, use_cache=False).logits[0].float()
    return logits.log_softmax(-1)[:-1].gather(1, ids[0, 1:, None])[:, 0]


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__

"""What a sample costs to compute: forward FLOPs of a decoder as a function of the sample's length.

Invariant: `linear`·s + `quadratic`·s² in integers, so that sums do not depend on their order. The quadratic
term is causal attention. A backward pass multiplies all by the same factor: balance does not see it.
Torch-free; knows shapes of models, nothing of their weights or of how samples are packed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slime.errors import ModelError


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleFlops:
    """Forward FLOPs of one sample. Samples of a packed row do not attend to each other, so theirs add up.

    Attributes:
        linear: FLOPs a token: projections, feed-forward, head.
        quadratic: FLOPs a pair of positions, with the masked half already left out.
    """

    linear: int
    quadratic: int

    def __call__(self, length: int) -> int:
        """FLOPs of a sample of `length` tokens."""
        return length * (self.linear + self.quadratic * length)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): widths of compressions and heads."""

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """Routed layers: `per_token` experts of width `ffn` and shared ones of total width `shared_ffn`.

    `dense_layers` layers of the model have the plain feed-forward instead.
    """

    ffn: int
    per_token: int
    shared_ffn: int = 0
    dense_layers: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Sizes of a decoder with gated feed-forward (three matrices) and grouped-query or latent attention."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocabulary: int
    latent: LatentAttention | None = None
    experts: Experts | None = None

    def sample_flops(self) -> SampleFlops:
        """The cost of a sample: a multiply-add is 2 FLOPs; embedding, norms, softmax and router are left out.

        layers x [qkv 2·s·h·(heads + 2·kv_heads)·d + scores and values 2·s²·heads·d (causal half)
        + out 2·s·heads·d·h + feed-forward 6·s·h·ffn] + head 2·s·h·V; ffn of a routed layer: experts a token
        x their width + shared width.
        """
        if self.latent is None:
            projections, pairs = self._grouped_query()
        else:
            projections, pairs = self._latent(self.latent)
        feed_forward = 6 * self.hidden * self.ffn_of_all_layers()
        head = 2 * self.hidden * self.vocabulary
        return SampleFlops(
            linear=self.layers * projections + feed_forward + head, quadratic=self.layers * pairs
        )

    def _grouped_query(self) -> tuple[int, int]:
        width = self.heads * self.head_dim
        qkv = 2 * self.hidden * (self.heads + 2 * self.kv_heads) * self.head_dim
        return qkv + 2 * width * self.hidden, 2 * width

    def _latent(self, latent: LatentAttention) -> tuple[int, int]:
        """Projections through the compressions; keys of nope + rope, values of their own size."""
        key = latent.qk_nope_head_dim + latent.qk_rope_head_dim
        if latent.q_lora_rank is None:
            query = 2 * self.hidden * self.heads * key
        else:
            query = 2 * latent.q_lora_rank * (self.hidden + self.heads * key)
        down = 2 * self.hidden * (latent.kv_lora_rank + latent.qk_rope_head_dim)
        up = 2 * latent.kv_lora_rank * self.heads * (latent.qk_nope_head_dim + latent.v_head_dim)
        out = 2 * self.heads * latent.v_head_dim * self.hidden
        return query + down + up + out, self.heads * (key + latent.v_head_dim)

    def ffn_of_all_layers(self) -> int:
        """Widths of the feed-forwards that a token passes, summed over the layers."""
        if self.experts is None:
            return self.layers * self.ffn
        routed = self.experts.ffn * self.experts.per_token + self.experts.shared_ffn
        dense = self.experts.dense_layers
        return dense * self.ffn + (self.layers - dense) * routed


def shape_of_config(config: Mapping[str, Any]) -> ModelShape:
    """The shape in a Hugging Face `config.json` (of a text model, or its `text_config`).

    Raises:
        ModelError: a size that the formula needs is missing.
    """
    config = config.get("text_config", config)
    hidden, heads = _size(config, "hidden_size"), _size(config, "num_attention_heads")
    return ModelShape(
        layers=_size(config, "num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or hidden // heads,
        ffn=_size(config, "intermediate_size"),
        vocabulary=_size(config, "vocab_size"),
        latent=_latent_of(config) if config.get("kv_lora_rank") else None,
        experts=_experts_of(config) if config.get("num_experts_per_tok") else None,
    )


def _latent_of(config: Mapping[str, Any]) -> LatentAttention:
    return LatentAttention(
        q_lora_rank=config.get("q_lora_rank"),
        kv_lora_rank=_size(config, "kv_lora_rank"),
        qk_nope_head_dim=_size(config, "qk_nope_head_dim"),
        qk_rope_head_dim=_size(config, "qk_rope_head_dim"),
        v_head_dim=_size(config, "v_head_dim"),
    )


def _experts_of(config: Mapping[str, Any]) -> Experts:
    """Mixtral has no width of its own for experts; DeepSeek counts shared experts, Qwen gives their width."""
    ffn = config.get("moe_intermediate_size") or _size(config, "intermediate_size")
    shared = config.get("shared_expert_intermediate_size") or ffn * (config.get("n_shared_experts") or 0)
    dense = config.get("first_k_dense_replace") or len(config.get("mlp_only_layers") or ())
    return Experts(
        ffn=ffn, per_token=_size(config, "num_experts_per_tok"), shared_ffn=shared, dense_layers=dense
    )


def _size(config: Mapping[str, Any], name: str) -> int:
    value = config.get(name)
    if not isinstance(value, int) or value < 1:
        raise ModelError(
            f"{name} is {value!r}, but the FLOPs of a sample need it",
            place="config.json",
            remedy="give a config with this size, or pass `flops` as a function of the length",
        )
    return value

"""What goes into the engine and what comes out: `SamplingParams`, `Request`, `Update`.

Invariant: values only, checked by whoever parses them (the HTTP layer); every list of an `Update` is a copy
that the engine never touches again. Torch-free; knows nothing of HTTP, models or scheduling.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

TokenLogprob: TypeAlias = tuple[float | None, int]
"""Natural log-probability (None for the first token of a prompt) and token id."""

TopLogprobs: TypeAlias = list[tuple[float, int]]
"""The likeliest tokens of one position, best first."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to sample one request. Names and meanings are those of SGLang's `sampling_params`.

    Attributes:
        temperature: divides the logits; 0 is greedy.
        top_k: sample among the k likeliest tokens; -1 is all.
        min_p: drop tokens less likely than `min_p` times the likeliest.
        min_new_tokens: no stop token is sampled, and no stop string ends the request, before so many tokens.
        sampling_seed: None draws a fresh seed.
        no_stop_trim: leave the stop string or stop token in the text.
        repetition_penalty: divides positive, multiplies negative logits of seen tokens (Keskar et al. 2019).
    """

    max_new_tokens: int = 128
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    sampling_seed: int | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    no_stop_trim: bool = False
    logit_bias: Mapping[int, float] | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0


@dataclass(kw_only=True)
class Request:
    """One generation.

    Attributes:
        rid: name of the request; unique among the requests in flight.
        input_ids: prompt, each id in [0, vocab_size); not empty.
        logprob_start_len: prompt position from which `Update.input_logprobs` are wanted; -1 is none.
        top_logprobs_num: how many likeliest tokens to report at each reported position.
        image_data: images as URLs, for engines that take them.
        stream: send an update after every token, not only at the end.
        want_text: decode text; without it, and without stop strings, `Update.text` stays empty.
        return_routed_experts: tell the experts of all tokens but the last, from
            `routed_experts_start_len` on.
    """

    rid: str
    input_ids: list[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    return_logprob: bool = False
    logprob_start_len: int = -1
    top_logprobs_num: int = 0
    image_data: tuple[str, ...] = ()
    stream: bool = False
    want_text: bool = True
    return_routed_experts: bool = False
    routed_experts_start_len: int = 0


@dataclass(frozen=True, kw_only=True)
class Update:
    """State of a request, cumulative since its start.

    Attributes:
        output_ids: sampled tokens, a stop token included.
        output_logprobs: natural log-prob of each sampled token over the full vocabulary, after temperature
            and before top-k, top-p and min-p; empty without `return_logprob`.
        input_logprobs: (log-prob, id) of the prompt tokens from `logprob_start_len` on, first (None, id).
        output_top_logprobs, input_top_logprobs: one list a position; empty without `top_logprobs_num`.
        finish_reason: None while running, else SGLang's ``{"type": "stop"|"length"|"abort", ...}``.
        cached_tokens: prompt tokens that were not computed again.
        weight_version: version that the engine holds now.
        weight_versions: ``{"version", "start", "end"}`` spans over `output_ids`.
        more_meta: further entries of SGLang's `meta_info`.
    """

    rid: str
    text: str
    output_ids: list[int]
    output_logprobs: list[float]
    input_logprobs: list[TokenLogprob]
    output_top_logprobs: list[TopLogprobs]
    input_top_logprobs: list[TopLogprobs | None]
    finish_reason: dict[str, Any] | None
    prompt_tokens: int
    cached_tokens: int
    weight_version: str
    weight_versions: list[dict[str, Any]]
    num_retractions: int
    more_meta: Mapping[str, Any] = field(default_factory=dict)

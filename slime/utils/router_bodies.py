"""What sglang-router leaves of a `/generate` body.

It parses a body and writes it anew from the fields that it knows, so all others are lost on the way to the
worker, without an error. Seen with sglang-router 0.3.2, and held to it by tests/sglang/test_router.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

KEPT_FIELDS = frozenset(
    {
        *(
            "audio_data",
            "background",
            "bootstrap_host",
            "bootstrap_port",
            "bootstrap_room",
            "conversation_id",
        ),
        *("custom_labels", "custom_logit_processor", "data_parallel_rank", "extra_key", "image_data"),
        *("input_ids", "log_metrics", "logprob_start_len", "lora_path", "modalities", "model", "no_logs"),
        *("priority", "return_bytes", "return_entropy", "return_hidden_states", "return_logprob"),
        *("return_text_in_logprobs", "rid", "sampling_params", "session_params", "stream", "text"),
        *("token_ids_logprob", "top_logprobs_num", "video_data"),
    }
)
KEPT_SAMPLING_PARAMS = frozenset(
    {
        *("ebnf", "frequency_penalty", "ignore_eos", "json_schema", "max_new_tokens", "min_new_tokens"),
        *("min_p", "n", "no_stop_trim", "presence_penalty", "regex", "repetition_penalty", "sampling_seed"),
        *("skip_special_tokens", "stop", "stop_token_ids", "temperature", "top_k", "top_p"),
    }
)
MAY_BE_LOST = frozenset({"spaces_between_special_tokens"})
"""Sampling parameters whose loss changes no token: this one matters to the text of slow tokenizers only."""


def lost_fields(body: Mapping[str, Any]) -> list[str]:
    """Names of what `body` would lose and miss, nested ones as ``sampling_params.x``; null is absent."""
    params = body.get("sampling_params") or {}
    lost = [name for name, value in body.items() if value is not None and name not in KEPT_FIELDS]
    return lost + [
        f"sampling_params.{name}"
        for name, value in params.items()
        if value is not None and name not in KEPT_SAMPLING_PARAMS | MAY_BE_LOST
    ]

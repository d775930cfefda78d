"""From the JSON body of `/generate` to engine `Request`s.

Invariant: a `Request` made here can be run: ids inside the vocabulary, prompt and answer inside the context.
Everything else is an `EngineRequestError` (HTTP 400) that names the field. Knows nothing of sockets.
"""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from slime.errors import EngineRequestError
from slime.serving.embedded.core import EngineCore
from slime.serving.embedded.request import Request, SamplingParams
from slime.serving.embedded.sampling import (
    boolean,
    check_token_ids,
    integer,
    parse_sampling_params,
)

_UNSUPPORTED = (
    "input_embeds",
    "image_data",
    "video_data",
    "audio_data",
    "lora_path",
    "token_ids_logprob",
    "return_hidden_states",
    "custom_logit_processor",
    "session_params",
)
_START_LEN = integer("a whole number, at least -1", lambda x: x >= -1)
_FROM = integer("a whole number, at least 0", lambda x: x >= 0)
_TOP_NUM = integer("a whole number in [0, 100]", lambda x: 0 <= x <= 100)


@dataclass(frozen=True, kw_only=True)
class GenerateCall:
    """A checked `/generate` body.

    Attributes:
        rid: name under which all its requests are aborted together, or None for one name a request.
        is_list: the answer is a JSON list (a batch, or n > 1); the n answers of a prompt stand together.
    """

    requests: list[Request]
    rid: str | None
    is_list: bool
    stream: bool
    text_in_logprobs: bool


def parse_json(body: bytes) -> dict[str, Any]:
    """The JSON object of a request body.

    Raises:
        EngineRequestError: empty, not JSON, or not an object.
    """
    if not body:
        raise EngineRequestError("the request has no body; send a JSON object.")
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise EngineRequestError(f"the body is not JSON: {error}.") from error
    if not isinstance(value, dict):
        raise EngineRequestError(f"the body must be a JSON object, got {type(value).__name__}.")
    return value


def parse_generate(body: Mapping[str, Any], engine: EngineCore) -> GenerateCall:
    """Check a `/generate` body and make its requests. Unknown top-level fields are ignored, as SGLang does.

    Raises:
        EngineRequestError: names what is wrong and what is allowed.
    """
    for name in _UNSUPPORTED:
        if body.get(name) and not (name == "image_data" and engine.takes_images):
            raise EngineRequestError(f"{name} is not supported by the embedded engine.")
    prompts, is_batch = _prompts(body, engine)
    fields = _Fields(body, len(prompts), is_batch)
    items = [_item(fields, index, ids, engine) for index, ids in enumerate(prompts)]
    is_list = is_batch or any(count > 1 for _, count in items)
    requests = [copy for item, count in items for copy in _copies(item, count)]
    rid = _name(body.get("rid"), requests, items, is_list)
    return GenerateCall(
        requests=requests,
        rid=rid,
        is_list=is_list,
        stream=flag(body, "stream"),
        text_in_logprobs=flag(body, "return_text_in_logprobs"),
    )


def flag(body: Mapping[str, Any], name: str) -> bool:
    """A boolean field; absent and null are false."""
    value = body.get(name)
    return False if value is None else boolean(name, value)


def check_prompt(ids: list[Any], engine: EngineCore, name: str = "input_ids") -> None:
    """Raise unless `ids` is a prompt that the engine can run."""
    if not ids:
        raise EngineRequestError(f"{name} cannot be empty.")
    check_token_ids(name, ids, engine.vocab_size)
    if len(ids) >= engine.context_length:
        raise EngineRequestError(
            f"The input ({len(ids)} tokens) is longer than the model's context length "
            f"({engine.context_length} tokens)."
        )


def check_length(prompt: int, params: SamplingParams, engine: EngineCore) -> None:
    """Raise when prompt and answer do not fit the context together."""
    total = prompt + params.max_new_tokens
    if total > engine.context_length:
        raise EngineRequestError(
            "Requested token count exceeds the model's maximum context length of "
            f"{engine.context_length} tokens. "
            f"You requested a total of {total} tokens: {prompt} tokens from the input and "
            f"max_new_tokens={params.max_new_tokens} for the completion."
        )


def _prompts(body: Mapping[str, Any], engine: EngineCore) -> tuple[list[list[int]], bool]:
    text, ids = body.get("text"), body.get("input_ids")
    if (text is None) == (ids is None):
        problem = "Either text or input_ids should be provided" + (", not both." if text is not None else ".")
        raise EngineRequestError(problem)
    if text is not None:
        prompts, is_batch = _encoded(text, engine)
    else:
        prompts, is_batch = _id_lists(ids)
    for prompt in prompts:
        check_prompt(prompt, engine, "text" if text is not None else "input_ids")
    return prompts, is_batch


def _encoded(text: Any, engine: EngineCore) -> tuple[list[list[int]], bool]:
    texts = text if isinstance(text, list) else [text]
    if not texts or not all(isinstance(item, str) for item in texts):
        raise EngineRequestError("text must be a string or a non-empty list of strings.")
    return [list(engine.tokenizer.encode(item)) for item in texts], isinstance(text, list)


def _id_lists(ids: Any) -> tuple[list[list[int]], bool]:
    if not isinstance(ids, list):
        raise EngineRequestError("input_ids must be a list of token ids or a list of such lists.")
    if not ids:
        raise EngineRequestError("input_ids cannot be empty.")
    nested = [isinstance(item, list) for item in ids]
    if any(nested) and not all(nested):
        raise EngineRequestError("input_ids mixes token ids and lists.")
    return (ids, True) if nested[0] else ([ids], False)


@dataclass(frozen=True)
class _Fields:
    """The fields of a body whose value may differ from prompt to prompt of a batch."""

    body: Mapping[str, Any]
    count: int
    is_batch: bool

    def value(self, name: str, index: int, default: Any) -> Any:
        value = self.body.get(name)
        if self.is_batch and isinstance(value, list):
            if len(value) != self.count:
                raise EngineRequestError(f"{name} has {len(value)} items for {self.count} prompts.")
            value = value[index]
        return default if value is None else value


def _item(fields: _Fields, index: int, ids: list[int], engine: EngineCore) -> tuple[Request, int]:
    """One prompt's request, still without its name, and its `n`."""
    params, n = parse_sampling_params(
        fields.value("sampling_params", index, {}),
        vocab_size=engine.vocab_size,
        room=engine.context_length - len(ids),
    )
    check_length(len(ids), params, engine)
    start = _START_LEN("logprob_start_len", fields.value("logprob_start_len", index, -1), 0)
    if start >= len(ids):
        raise EngineRequestError(
            f"logprob_start_len must be below the prompt's {len(ids)} tokens, got {start}."
        )
    request = Request(
        rid="",
        input_ids=ids,
        params=params,
        return_logprob=boolean("return_logprob", fields.value("return_logprob", index, False)),
        logprob_start_len=start,
        top_logprobs_num=_TOP_NUM("top_logprobs_num", fields.value("top_logprobs_num", index, 0), 0),
        image_data=_images(fields.value("image_data", index, [])),
        stream=flag(fields.body, "stream"),
        return_routed_experts=flag(fields.body, "return_routed_experts"),
        routed_experts_start_len=_routes_start(fields.body, len(ids)),
    )
    return request, n


def _routes_start(body: Mapping[str, Any], prompt: int) -> int:
    start: int = _FROM("routed_experts_start_len", body.get("routed_experts_start_len") or 0, 0)
    if start > prompt:
        raise EngineRequestError(
            f"routed_experts_start_len must be at most the prompt's {prompt} tokens, got {start}."
        )
    return start


def _images(value: Any) -> tuple[str, ...]:
    images = value if isinstance(value, list) else [value]
    if not all(isinstance(image, str) and image for image in images):
        raise EngineRequestError("image_data must be a URL or a list of URLs.")
    return tuple(images)


def _copies(request: Request, count: int) -> list[Request]:
    """`count` requests of the same prompt; a given seed is counted up, so that they differ."""
    seed = request.params.sampling_seed
    if seed is None or count == 1:
        return [dataclasses.replace(request) for _ in range(count)]
    params = [dataclasses.replace(request.params, sampling_seed=seed + k) for k in range(count)]
    return [dataclasses.replace(request, params=each) for each in params]


def _name(rid: Any, requests: list[Request], items: list[tuple[Request, int]], is_list: bool) -> str | None:
    """Give every request its name; returns the client's name for all of them."""
    if isinstance(rid, list):
        names = _listed_names(rid, [count for _, count in items])
    elif rid is None:
        names = [uuid.uuid4().hex for _ in requests]
    elif isinstance(rid, str) and rid:
        names = [f"{rid}_{k}" for k in range(len(requests))] if is_list else [rid]
    else:
        raise EngineRequestError(f"rid must be a non-empty string or a list of them, got {rid!r}.")
    if len(set(names)) != len(names):
        raise EngineRequestError("rid holds the same name twice.")
    for request, name in zip(requests, names, strict=True):
        request.rid = name
    return rid if isinstance(rid, str) else None


def _listed_names(rids: list[Any], counts: list[int]) -> list[str]:
    if len(rids) != len(counts):
        raise EngineRequestError(f"rid has {len(rids)} items for {len(counts)} prompts.")
    if not all(isinstance(rid, str) and rid for rid in rids):
        raise EngineRequestError(f"rid must hold non-empty strings, got {rids!r}.")
    pairs = zip(rids, counts, strict=True)
    return [name for rid, n in pairs for name in ([rid] if n == 1 else [f"{rid}_{k}" for k in range(n)])]

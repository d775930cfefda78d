"""POST /v1/chat/completions: OpenAI's chat protocol over the tokenizer's template, without tools.

Invariant: the prompt is what the template renders, and the request runs as the same ids on
`/generate` do. Knows nothing of sessions, tool calls or reasoning parsers.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from slime.errors import EngineRequestError
from slime.serving.embedded.core import EngineCore
from slime.serving.embedded.dispatch import RequestFailedError
from slime.serving.embedded.protocol import GenerateCall, flag, parse_generate, parse_json
from slime.serving.embedded.request import Request, Update
from slime.serving.embedded.responses import meta_info, no_text, version_spans
from slime.serving.embedded.sampling import integer
from slime.serving.embedded.state import STATE, EventStream, ServerState, json_response

_SAME_NAME = (
    *("temperature", "top_p", "top_k", "min_p", "n", "logit_bias"),
    *("stop", "stop_token_ids", "ignore_eos", "skip_special_tokens", "no_stop_trim"),
    *("frequency_penalty", "presence_penalty", "repetition_penalty"),
)
_RENAMED = {
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "seed": "sampling_seed",
}
_TOP = integer("a whole number in [0, 20]", lambda x: 0 <= x <= 20)


@dataclass(frozen=True, kw_only=True)
class ChatCall:
    """A checked chat body: the generation behind it, and what its answer shows."""

    generate: GenerateCall
    logprobs: bool
    prompt_token_ids: bool
    meta_info: bool
    usage_in_stream: bool

    @property
    def id(self) -> str:
        """The answer's id."""
        return self.generate.rid or self.generate.requests[0].rid


def parse_chat(body: Mapping[str, Any], engine: EngineCore) -> ChatCall:
    """Check a chat body.

    Raises:
        EngineRequestError: tools, no chat template, malformed messages, or a bad parameter.
    """
    _refuse_unsupported(body)
    logprobs = flag(body, "logprobs")
    generate_body = {
        "input_ids": _prompt_ids(body, engine),
        "sampling_params": _sampling(body),
        "return_logprob": logprobs,
        "top_logprobs_num": _TOP("top_logprobs", body.get("top_logprobs") or 0, 0),
        "stream": body.get("stream"),
        "rid": body.get("rid"),
    }
    options = body.get("stream_options") or {}
    if not isinstance(options, dict):
        raise EngineRequestError(f"stream_options must be an object, got {options!r}.")
    return ChatCall(
        generate=parse_generate(generate_body, engine),
        logprobs=logprobs,
        prompt_token_ids=flag(body, "return_prompt_token_ids"),
        meta_info=flag(body, "return_meta_info"),
        usage_in_stream=flag(options, "include_usage"),
    )


def _refuse_unsupported(body: Mapping[str, Any]) -> None:
    if body.get("tools") or body.get("functions"):
        raise EngineRequestError(
            "tools are not supported by the embedded engine; render them into the prompt and use /generate."
        )
    response_format = body.get("response_format")
    if response_format and response_format != {"type": "text"}:
        raise EngineRequestError(
            "response_format must be {'type': 'text'}; constrained output is not supported."
        )


def _sampling(body: Mapping[str, Any]) -> dict[str, Any]:
    """OpenAI's names to SGLang's; without a limit the answer may fill the context."""
    names = {name: name for name in _SAME_NAME} | _RENAMED
    given = {ours: body[theirs] for theirs, ours in names.items() if body.get(theirs) is not None}
    return {"max_new_tokens": None} | given


def _prompt_ids(body: Mapping[str, Any], engine: EngineCore) -> list[int]:
    from jinja2 import TemplateError

    tokenizer = engine.tokenizer
    if not getattr(tokenizer, "chat_template", None):
        raise EngineRequestError(
            f"the tokenizer of {engine.model_path} has no chat template; "
            "use /generate with text or input_ids."
        )
    extra = body.get("chat_template_kwargs") or {}
    if not isinstance(extra, dict):
        raise EngineRequestError(f"chat_template_kwargs must be an object, got {extra!r}.")
    try:
        text = tokenizer.apply_chat_template(
            _messages(body.get("messages")), **({"add_generation_prompt": True} | extra | {"tokenize": False})
        )
    except (TemplateError, TypeError, ValueError) as error:
        raise EngineRequestError(f"messages: the chat template refused them: {error}") from error
    return list(tokenizer.encode(text, add_special_tokens=False))


def _messages(messages: Any) -> list[dict[str, Any]]:
    if not isinstance(messages, list) or not messages:
        raise EngineRequestError("messages must be a non-empty list.")
    return [_message(f"messages[{index}]", message) for index, message in enumerate(messages)]


def _message(place: str, message: Any) -> dict[str, Any]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise EngineRequestError(f"{place} must be an object with a role.")
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(_part(place, part) for part in content)
    if content is not None and not isinstance(content, str):
        raise EngineRequestError(f"{place}.content must be a string or a list of text parts.")
    return message | {"content": content or ""}


def _part(place: str, part: Any) -> str:
    if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        raise EngineRequestError(f"{place}.content may hold text parts only, got {part!r}.")
    text: str = part["text"]
    return text


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """POST /v1/chat/completions."""
    state = request.app[STATE]
    started = time.perf_counter()
    call = parse_chat(parse_json(await request.read()), state.engine)
    if call.generate.stream:
        return await _stream(request, state, call)
    updates = await state.dispatcher.run(call.generate.requests, call.generate.rid)
    latency = time.perf_counter() - started
    choices = [_choice(state, call, index, update, latency) for index, update in enumerate(updates)]
    return json_response(
        _envelope(state, call, "chat.completion")
        | {"choices": choices, "usage": _usage(updates), "metadata": _metadata(updates[0])}
    )


def _envelope(state: ServerState, call: ChatCall, kind: str) -> dict[str, Any]:
    return {"id": call.id, "object": kind, "created": int(time.time()), "model": state.model_name}


def _choice(state: ServerState, call: ChatCall, index: int, update: Update, latency: float) -> dict[str, Any]:
    request = call.generate.requests[index]
    choice = {
        "index": index,
        "message": {
            "role": "assistant",
            "content": update.text,
            "reasoning_content": None,
            "tool_calls": None,
        },
        "logprobs": _logprobs(state, update, 0) if call.logprobs else None,
        **_finish(update),
    }
    if call.prompt_token_ids:
        choice["prompt_token_ids"] = request.input_ids
    if call.meta_info:
        choice["meta_info"] = meta_info(request, update, latency=latency, token_text=no_text)
    return choice


def _finish(update: Update) -> dict[str, Any]:
    reason = update.finish_reason or {"type": None}
    return {"finish_reason": reason["type"], "matched_stop": reason.get("matched")}


def _usage(updates: Sequence[Update]) -> dict[str, Any]:
    """Token counts; the prompt counts once, however many answers it has."""
    prompt = updates[0].prompt_tokens
    completion = sum(len(update.output_ids) for update in updates)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": updates[0].cached_tokens},
        "reasoning_tokens": 0,
    }


def _metadata(update: Update) -> dict[str, Any]:
    return {"weight_version": update.weight_version, "weight_versions": version_spans(update)}


def _logprobs(state: ServerState, update: Update, start: int) -> dict[str, Any]:
    """OpenAI's `logprobs` of the tokens from `start` on."""
    tops = update.output_top_logprobs or [[] for _ in update.output_ids]
    rows = zip(update.output_ids, update.output_logprobs, tops, strict=True)
    content = [
        _token(state, token, value) | {"top_logprobs": [_token(state, t, v) for v, t in top]}
        for token, value, top in rows
    ]
    return {"content": content[start:]}


def _token(state: ServerState, token: int, value: float) -> dict[str, Any]:
    text = state.token_text(token)
    return {"token": text, "logprob": value, "bytes": list(text.encode())}


async def _stream(request: web.Request, state: ServerState, call: ChatCall) -> web.StreamResponse:
    requests = call.generate.requests
    deltas = [_Delta(state, call, index) for index in range(len(requests))]
    stream = EventStream(request)
    async with aclosing(state.dispatcher.updates(requests, call.generate.rid)) as updates:
        try:
            async for index, update in updates:
                for choice in deltas[index].take(update):
                    await stream.send(_chunk(state, call, choice))
        except RequestFailedError as error:
            await stream.fail(error)
    if call.usage_in_stream:
        last = [delta.last for delta in deltas if delta.last is not None]
        await stream.send(_envelope(state, call, "chat.completion.chunk") | _closing(last))
    return await stream.finish()


def _closing(last: Sequence[Update]) -> dict[str, Any]:
    return {"choices": [], "usage": _usage(last) if last else None}


def _chunk(state: ServerState, call: ChatCall, choice: Mapping[str, Any]) -> dict[str, Any]:
    return _envelope(state, call, "chat.completion.chunk") | {"choices": [choice], "usage": None}


class _Delta:
    """Turns the cumulative updates of one choice into OpenAI's increments."""

    def __init__(self, state: ServerState, call: ChatCall, index: int) -> None:
        self._state = state
        self._call = call
        self._index = index
        self.last: Update | None = None

    def take(self, update: Update) -> list[dict[str, Any]]:
        """The choices of the next chunks; a choice begins with its role."""
        begin = [] if self.last else [self._opening()]
        text_before = self.last.text if self.last else ""
        count_before = len(self.last.output_ids) if self.last else 0
        self.last = update
        logprobs = _logprobs(self._state, update, count_before) if self._call.logprobs else None
        delta = {"content": update.text[len(text_before) :]}
        return [*begin, self._choice(delta, logprobs) | _finish(update)]

    def _opening(self) -> dict[str, Any]:
        request: Request = self._call.generate.requests[self._index]
        extra = {"prompt_token_ids": request.input_ids} if self._call.prompt_token_ids else {}
        return self._choice({"role": "assistant", "content": ""}, None) | extra

    def _choice(self, delta: dict[str, Any], logprobs: dict[str, Any] | None) -> dict[str, Any]:
        return {
            "index": self._index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": None,
            "matched_stop": None,
        }


ROUTES = [web.post("/v1/chat/completions", chat_completions)]

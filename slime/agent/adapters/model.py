"""What an adapter knows of the policy: tokenizer, chat template, output formats, and the tokens it samples.

Invariant: sampled ids become text and events in the order in which they come, however they are cut; the token
that ends a turn is no text. Knows neither sessions nor HTTP.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from slime.agent.adapters.wire import AdapterError, ModelRequest
from slime.agent.encoding import text_encoder
from slime.agent.parsing import OutputParser, ParsedModelOutput, detect_parsers
from slime.agent.parsing.events import OutputEvent
from slime.agent.parsing.forced import call_opening
from slime.agent.session import Prompt
from slime.agent.template import ChatTemplate
from slime.utils.detokenizer import CONTEXT_TOKENS, IncrementalDecoder, StopStrings

logger = logging.getLogger(__name__)
SAMPLING_DEFAULTS: Mapping[str, Any] = {
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
    "no_stop_trim": True,
    "max_new_tokens": 4096,
}
_DECODE_OPTIONS = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}


@dataclass
class Output:
    """What has been sampled so far, as text, events and ids.

    Attributes:
        stop_ids: tokens that end a turn, and are no text.
        special_ids: tokens that may turn out to have ended it; the newest waits for what follows.
        opening: what the answer begins with that was not sampled.
    """

    decoder: IncrementalDecoder
    parser: OutputParser
    stops: StopStrings
    stop_ids: frozenset[int]
    special_ids: frozenset[int]
    opening: str = ""
    ids: list[int] = field(default_factory=list)
    events: list[OutputEvent] = field(default_factory=list)
    text: str = ""
    given: int = 0
    stop_sequence: str | None = None
    waiting: list[int] = field(default_factory=list)

    def push(self, ids: Sequence[int]) -> list[OutputEvent]:
        """Events that new ids complete; the token that ends the turn is no text."""
        self.ids.extend(ids)
        ready = self.waiting + [token for token in ids if token not in self.stop_ids]
        self.waiting = ready[-1:] if ready and ready[-1] in self.special_ids else []
        return self._more(self._begun() + self.decoder.push(ready[: len(ready) - len(self.waiting)]))

    def finish(self, matched: object = None) -> list[OutputEvent]:
        """The remaining events; `matched` is the token id at which the engine stopped, if it was one."""
        last = [token for token in self.waiting if token != matched]
        events = self._more(self._begun() + self.decoder.push(last)) + self._more(self.decoder.pending())
        rest = self.text[self.given :] if self.stop_sequence is None else ""
        return events + self._kept(self.parser.feed(rest)) + self._kept(self.parser.finish())

    @property
    def parsed(self) -> ParsedModelOutput:
        """The whole, after `finish`."""
        return self.parser.result

    def _begun(self) -> str:
        opening, self.opening = self.opening, ""
        return opening

    def _more(self, text: str) -> list[OutputEvent]:
        if not text or self.stop_sequence is not None:
            return []
        self.text += text
        found = self.stops.find(self.text, len(text))
        end = found[1] if found else self.stops.safe_length(self.text)
        if found:
            self.stop_sequence = found[0]
        start, self.given = self.given, max(end, self.given)
        return self._kept(self.parser.feed(self.text[start : self.given]))

    def _kept(self, events: list[OutputEvent]) -> list[OutputEvent]:
        self.events.extend(events)
        return events


class Model:
    """The policy as its tokenizer tells.

    Args:
        tool_parser: see `slime.agent.parsing`; None takes what the chat template tells.
        reasoning_parser: likewise.
        chat_template_kwargs: passed to the chat template.

    Raises:
        ModelError: the chat template cannot be used.
        ConfigError: a parser that is not known.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        tool_parser: str | None = None,
        reasoning_parser: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.template = ChatTemplate(tokenizer, kwargs=chat_template_kwargs)
        source = getattr(tokenizer, "chat_template", None)
        detected = detect_parsers(source if isinstance(source, str) else "")
        self.tool_parser = tool_parser or detected[0]
        self.reasoning_parser = reasoning_parser or detected[1]
        OutputParser(tool_parser=self.tool_parser, reasoning_parser=self.reasoning_parser)
        self._encode = text_encoder(tokenizer)
        self._decode_options = _accepted(tokenizer.decode, _DECODE_OPTIONS)
        self._special_ids = frozenset(getattr(tokenizer, "all_special_ids", None) or ())
        self._has_warned = False

    def opening(self, request: ModelRequest) -> str | None:
        """What a demanded call begins with; empty where none is demanded, None where none can be begun."""
        if request.tool_choice in ("auto", "none") or not request.tools:
            return ""
        name = None if request.tool_choice == "required" else request.tool_choice
        opening = call_opening(self.tool_parser, name)
        if opening and self.template.can_continue and not self._opens_reasoning(request):
            return opening
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "a client demands a tool call, which cannot be begun for this model (tool parser %s)",
                self.tool_parser,
            )
        return None

    def output(self, request: ModelRequest, prompt: Prompt, opening: str) -> Output:
        """Takes what is sampled for a request."""
        has_tools = bool(request.tools) and request.tool_choice != "none"
        parser = OutputParser(
            tool_parser=self.tool_parser if has_tools else None,
            reasoning_parser=self.reasoning_parser,
            tools=[*request.tools, *request.extra.get("deferred_tools", ())],
            opens_reasoning=self._opens_reasoning(request),
        )
        context = [int(token) for token in prompt.ids[-CONTEXT_TOKENS:]]
        decoder = IncrementalDecoder(self.tokenizer, context, **self._decode_options)
        stops = StopStrings(request.stop)
        return Output(decoder, parser, stops, self.template.stop_ids, self._special_ids, opening)

    def count_tokens(self, text: str) -> int:
        """Tokens of a text; 0 where the tokenizer cannot encode."""
        return len(self._encode(text)) if text and self._encode is not None else 0

    def _opens_reasoning(self, request: ModelRequest) -> bool:
        return self.template.opens_reasoning_after(request.messages)


def sampling_params(
    request: ModelRequest,
    defaults: Mapping[str, Any],
    *,
    stop_ids: frozenset[int],
    prompt_tokens: int,
    max_context_tokens: int,
) -> dict[str, Any]:
    """The engine's sampling parameters: the session's, of which a client only lowers the token limit (law 7).

    Raises:
        AdapterError: ``context_overflow``, in the words after which clients compact.
    """
    if max_context_tokens and prompt_tokens >= max_context_tokens:
        message = f"prompt is too long: {prompt_tokens} tokens > {max_context_tokens} maximum"
        raise AdapterError("context_overflow", message)
    params = {**SAMPLING_DEFAULTS, **defaults}
    limits = [params["max_new_tokens"]]
    if request.max_tokens is not None:
        limits.append(request.max_tokens)
    if max_context_tokens:
        limits.append(max_context_tokens - prompt_tokens)
    return params | {
        "max_new_tokens": min(limits),
        "stop_token_ids": sorted({*stop_ids, *params.get("stop_token_ids", ())}),
        "stop": [*params.get("stop", ()), *request.stop],
    }


def _accepted(function: Callable[..., Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that a function takes."""
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return dict(options)
    return {name: value for name, value in options.items() if name in parameters}

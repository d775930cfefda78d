"""`MultiTurnLossMaskGenerator`: the token ids of a conversation, and which of them the assistant wrote.

Invariant: text is rendered once and cut only where a turn begins and ends, as generation cuts it; every
character of a turn (reasoning, content, tool calls, the token that ends it) is in a trained token and no
other character is. Special tokens in messages stay text. Knows no template by name, and nothing of training.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, TypeAlias

from slime.errors import ConfigError, DataError, ModelError

if TYPE_CHECKING:
    from slime.agent.template_turns import Turn

_log = logging.getLogger(__name__)
TOKENIZER_TYPES = ("auto", "qwen", "qwen3", "qwen3_5", "distill_qwen")
"""Accepted names of a tokenizer's type. All mean the same: what a template does is found out by probing."""
STEP_LOSS_MASK = "step_loss_mask"
_NUMBER = "slime_message_number"
Message: TypeAlias = dict[str, Any]


class MultiTurnLossMaskGenerator:
    """Token ids and loss masks of conversations, for any chat template.

    Args:
        tokenizer: of transformers, with a chat template.
        tokenizer_type: one of `TOKENIZER_TYPES`; it makes no difference.
        template_kwargs: for ``apply_chat_template``, such as ``enable_thinking``.

    Raises:
        ConfigError: an unknown `tokenizer_type`.
        ModelError: a chat template whose turns cannot be told from the rest of its rendering.
    """

    def __init__(
        self,
        tokenizer: Any,
        tokenizer_type: str = "auto",
        *,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        # slime.agent is above this package, so it is imported when it is used.
        from slime.agent.encoding import TextEncoder
        from slime.agent.template import ChatTemplate
        from slime.agent.template_probe import Renderer
        from slime.agent.template_turns import TurnFinder

        if tokenizer_type not in TOKENIZER_TYPES:
            raise ConfigError(
                f"{tokenizer_type!r} is none of {', '.join(TOKENIZER_TYPES)}", place="--loss-mask-type"
            )
        self._tokenizer = tokenizer
        self.report = ChatTemplate(tokenizer, kwargs=template_kwargs).report
        if not self.report.can_continue:
            raise ModelError(
                "the tokenizer cannot encode text by itself, or lists no added tokens",
                place="tokenizer",
                remedy="give a tokenizer of transformers",
            )
        source = str(getattr(tokenizer, "chat_template", ""))
        self._encoder = TextEncoder(tokenizer, lambda text: text in source)
        self._render = Renderer(tokenizer, template_kwargs or {})
        self._turns = TurnFinder(self._render, self.report, self._encoder.special)
        self._free = self._free_markers()
        self._warned: set[str] = set()

    def get_loss_mask(
        self, messages: Sequence[Message], tools: Sequence[Any] | None = None
    ) -> tuple[list[int], list[int]]:
        """Ids of the conversation, and for each 1 if it trains.

        An assistant message trains unless its ``step_loss_mask`` is 0.

        Raises:
            DataError: naming the message: it is malformed, or the template refuses it, or its turn cannot be
                told from the rest of the rendering.
        """
        fitted = self.report.fit.messages(self._checked(messages))
        names = [f"message {message.pop(_NUMBER, 0)}" for message in fitted]
        trains = [bool(message.pop(STEP_LOSS_MASK, 1)) for message in fitted]
        fitted, shown, mark = self._protected(fitted, [] if self.report.ignores_tools else list(tools or ()))
        text, turns = self._found(fitted, shown, names)
        for turn in (turn for turn in turns if trains[turn.position]):
            self._warn_of_loss(
                fitted[turn.position], text[turn.start : turn.end], names[turn.position], turn == turns[-1]
            )
        return self._encoded(text, turns, trains, mark)

    def get_text_from_loss_mask(self, token_ids: Sequence[int], loss_mask: Sequence[int]) -> list[str]:
        """The text of each run of trained tokens, special tokens included.

        Raises:
            ValueError: the lengths differ.
        """
        pairs = zip(token_ids, loss_mask, strict=True)
        runs = groupby(pairs, key=lambda pair: bool(pair[1]))
        return [str(self._tokenizer.decode([i for i, _ in run])) for trains, run in runs if trains]

    def get_response_lengths(self, loss_masks: Sequence[Sequence[int]]) -> list[int]:
        """For each mask, the number of tokens from the first trained one to the end; 0 if none trains."""
        return [len(mask) - list(mask).index(1) if 1 in mask else 0 for mask in loss_masks]

    def _free_markers(self) -> tuple[str, ...]:
        """Tokens that the assistant's own text may hold: they begin or end no message (``<think>``)."""
        report, tokenizer = self.report, self._tokenizer
        bound = {getattr(tokenizer, name, None) for name in ("bos_token", "eos_token", "pad_token")}
        bound |= {*report.ends, *report.call_ends, *report.next_roles}
        found = (t for t in self._encoder.control if t not in bound and t not in self._turns.structure)
        return tuple(sorted(found, key=len, reverse=True))

    def _checked(self, messages: Sequence[Message]) -> list[Message]:
        if not messages:
            raise DataError("the conversation has no messages", place="messages")
        parses = not self.report.fit.raw_arguments
        return [
            _checked(message, f"message {number}", parses=parses) | {_NUMBER: number}
            for number, message in enumerate(messages)
        ]

    def _protected(self, messages: list[Message], tools: list[Any]) -> tuple[list[Message], list[Any], str]:
        """Messages and tools with no token whole that is not the message's to write, and the mark in them."""
        # With a token among what is protected there is always a mark.
        (marked, shown, _), mark = self._encoder.protect((messages, tools, self._encoder.control[0]))
        assert mark is not None
        if not self._free:
            return marked, shown, mark
        free = re.compile("|".join(re.escape(token[0] + mark + token[1:]) for token in self._free))

        def release(text: str) -> str:
            return free.sub(lambda match: match.group().replace(mark, ""), text)

        return [_mapped(m, release) if m.get("role") == "assistant" else m for m in marked], shown, mark

    def _found(self, messages: list[Message], tools: list[Any], names: list[str]) -> tuple[str, list[Turn]]:
        from slime.agent.template_probe import TemplateRefusalError

        try:
            return self._turns.find(messages, tools, names)
        except TemplateRefusalError as error:
            place = names[self._refused_at(messages, tools)]
            raise DataError(error.message, place=place, remedy=error.remedy) from error

    def _warn_of_loss(self, message: Message, shown: str, name: str, is_last: bool) -> None:
        """Once for reasoning and once for content: the template does not show what should be trained.

        That earlier turns are shown without their reasoning is what the model sees when it generates.
        """
        inline, _, content = _text_of(message["content"], name).rpartition("</think>")
        reasoning = str(message.get("reasoning_content") or inline.rpartition("<think>")[2])
        said = {"content": content, "reasoning": reasoning if is_last else ""}
        for what in (what for what, words in said.items() if words.strip() not in shown):
            if what not in self._warned:
                self._warned.add(what)
                _log.warning("%s: the chat template does not show its %s, so it is not trained", name, what)

    def _refused_at(self, messages: list[Message], tools: list[Any]) -> int:
        """The message with which the template begins to refuse."""
        from slime.agent.template_probe import TemplateRefusalError

        for length in range(len(messages) - 1, 0, -1):
            try:
                self._render(messages[:length], tools, generate=False)
            except TemplateRefusalError:
                continue
            return length
        return 0

    def _encoded(
        self, text: str, turns: list[Turn], trains: list[bool], mark: str
    ) -> tuple[list[int], list[int]]:
        from slime.agent.template_turns import pieces

        ids: list[int] = []
        loss_mask: list[int] = []
        for piece, turn in pieces(text, turns):
            # What follows a mark is encoded as text from within a text.
            new = self._encoder.encode(mark + piece if ids else piece, mark)
            ids += new
            loss_mask += [int(turn is not None and trains[turn.position])] * len(new)
        return ids, loss_mask


def _checked(message: Any, place: str, *, parses: bool) -> Message:
    """A copy of the message without keys that are None; its content is a text."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise DataError("is not an object with a role", place=place)
    checked = {key: value for key, value in message.items() if value is not None}
    checked["content"] = _text_of(checked.get("content", ""), place)
    if checked.get(STEP_LOSS_MASK, 1) not in (0, 1):
        raise DataError(f"{STEP_LOSS_MASK} is {checked[STEP_LOSS_MASK]!r}, not 0 or 1", place=place)
    if "tool_calls" in checked:
        checked["tool_calls"] = [_checked_call(call, place, parses) for call in checked["tool_calls"]]
    return checked


def _text_of(content: Any, place: str) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    texts = [part.get("text") if isinstance(part, Mapping) else None for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise DataError(
            "content is neither a text nor a list of text parts",
            place=place,
            remedy="images and other parts cannot be trained on here",
        )
    return "".join(map(str, texts))


def _checked_call(call: Any, place: str, parses: bool) -> Message:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise DataError(
            "a tool call has no function with a name",
            place=place,
            remedy='write {"id": ..., "type": "function", "function": {"name": ..., "arguments": {...}}}',
        )
    arguments = function.get("arguments")
    if parses and isinstance(arguments, str):
        arguments = _parsed(arguments)
    return {**call, "function": {**function, "arguments": arguments}}


def _parsed(arguments: str) -> Any:
    """The object that is written in JSON, or the text itself: templates show that as malformed arguments."""
    try:
        value = json.loads(arguments)
    except ValueError:
        return arguments
    return value if isinstance(value, dict) else arguments


def _mapped(value: Any, function: Callable[[str], str]) -> Any:
    """A copy of nested lists, dicts and strings with a function applied to each string."""
    if isinstance(value, str):
        return function(value)
    if isinstance(value, Mapping):
        return {_mapped(key, function): _mapped(item, function) for key, item in value.items()}
    return [_mapped(item, function) for item in value] if isinstance(value, list) else value

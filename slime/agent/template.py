"""Message histories as prompt token ids: a first prompt whole, every later one by its exact delta.

Guaranteed: with a template that does not rewrite history, prompt + sampled ids + continuations decode to the
template's whole rendering. With one that does, they decode to the rendering in which every earlier turn stays
as it was sampled: its reasoning, white space, tools and system prompt where they first stood. What a
continuation costs does not depend on the history. Knows no protocol and no session.
"""

from __future__ import annotations

import logging
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from slime.agent.encoding import TextEncoder, text_encoder
from slime.agent.images import PlacedImage, has_images, urls_of
from slime.agent.messages import Message
from slime.agent.template_fit import TemplateFit
from slime.agent.template_images import with_images
from slime.agent.template_probe import REASONING_OPEN, Renderer, TemplateRefusalError, probe
from slime.agent.template_report import TemplateReport
from slime.agent.turn import Tokens
from slime.errors import ModelError

_log = logging.getLogger(__name__)


class ChatTemplate:
    """A tokenizer's chat template, probed.

    Args:
        tokenizer: with `apply_chat_template` and `decode`; continuations need `encode` or `__call__` with
            `add_special_tokens`, and `added_tokens_decoder`.
        kwargs: for `apply_chat_template`, such as ``enable_thinking``.

    Attributes:
        report: what the probe found.
        stop_ids: ids that end an assistant's turn.

    Raises:
        ModelError: no chat template, or one of which no exact delta can be formed.
    """

    report: TemplateReport
    stop_ids: frozenset[int]

    def __init__(self, tokenizer: Any, *, kwargs: Mapping[str, Any] | None = None) -> None:
        self._tokenizer = tokenizer
        self._render = Renderer(tokenizer, kwargs or {})
        self._sentinel = f"zq{secrets.token_hex(8)}qz"
        self._has_warned = False
        if text_encoder(tokenizer) is None:
            self.report = self._report_without_encoder()
            self.stop_ids = frozenset(_eos_ids(tokenizer))
            return
        if getattr(tokenizer, "chat_template", "") is None:
            raise ModelError(
                "the tokenizer has no chat template",
                place="chat template",
                remedy="put chat_template.jinja into the model's folder",
            )
        source = _template_source(tokenizer)
        self._encoder = TextEncoder(tokenizer, lambda text: source is None or text in source)
        found = probe(self._render, self._encoder.special, getattr(tokenizer, "bos_token", None) or "")
        found = with_images(found, self._render, self._encoder.special)
        self.report = replace(found, exact_pieces=self._encoder.cuts)
        ends = {i for end in (*found.ends, *found.call_ends) for i in self._encoder.encode(end)}
        self.stop_ids = frozenset(ends | _eos_ids(tokenizer))
        self._ends = _pattern(found.next_roles or found.ends)
        self._call_ends = _pattern(found.next_roles or found.call_ends)

    @property
    def can_continue(self) -> bool:
        """Whether `continuation` works; if not, callers render the whole history at each turn."""
        return self.report.can_continue

    @property
    def generation_prompt(self) -> str:
        """What stands between a user message and the first sampled token."""
        return self.report.generation_prompt

    @property
    def opens_reasoning(self) -> bool:
        """Whether the generation prompt behind a user message ends within the reasoning."""
        return self.report.opens_reasoning

    def opens_reasoning_after(self, messages: Sequence[Message]) -> bool:
        """Whether the turn that follows these messages begins within the reasoning."""
        told = bool(messages) and messages[-1].get("role") == "tool" and self.report.fit.tool_role
        return self.report.opens_reasoning_after_tools if told else self.report.opens_reasoning

    def prompt(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> list[int]:
        """Ids of the whole rendering with the generation prompt.

        Raises:
            TemplateRefusalError: the template takes no such messages.
        """
        fitted, shown = self.report.fit.messages(messages), self._shown(tools)
        if not self.can_continue:
            return self._render.ids(fitted, shown)
        (fitted, shown), mark = self._encoder.protect((fitted, shown))
        return self._encoder.encode(self._render(fitted, shown), mark)

    def placed(self, messages: Sequence[Message], ids: Tokens) -> list[PlacedImage]:
        """The images of messages, and their places among the ids that the messages were rendered to.

        Raises:
            TemplateRefusalError: the template shows no images, or another number of them.
        """
        if not any(map(has_images, messages)):
            return []
        urls, token = urls_of(self.report.fit.arranged(messages)), self.report.image_token
        positions = np.flatnonzero(ids == self._encoder.encode(token)[0]).tolist() if token else []
        if len(positions) != len(urls):
            raise TemplateRefusalError(
                f"the chat template shows {len(positions)} of {len(urls)} images",
                place="chat template",
                remedy="send text only, or give the tokenizer a chat template that shows images there",
            )
        return [PlacedImage(position, url) for position, url in zip(positions, urls, strict=True)]

    def check_placeholders(self, ids: Tokens, images: int) -> None:
        """Check that a prompt has as many placeholders as images, however its tokens spell them.

        Engines look for placeholders in the prompt's text, where one that a user typed or the model sampled
        would take an image that belongs to another.

        Raises:
            TemplateRefusalError: it has another number.
        """
        token = self.report.image_token
        count = self._encoder.decode(ids.tolist()).count(token)
        if count != images:
            raise TemplateRefusalError(
                f"the conversation holds {images} images, and {count} times {token!r}, which stands for one",
                place="chat template",
                remedy="leave this text out of conversations that hold images",
            )

    def encode(self, text: str) -> list[int]:
        """Ids of a text of our own: markers in it are markers.

        Raises:
            ModelError: the tokenizer cannot encode.
        """
        if not self.can_continue:
            raise ModelError("the tokenizer cannot encode text", place="tokenizer")
        return self._encoder.encode(text)

    def continuation(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] = (),
        *,
        previous: Message,
        closed: bool,
        last_id: int | None = None,
    ) -> list[int]:
        """Ids between the sampled ids of an assistant's turn and the next generation.

        Args:
            messages: the new ones only.
            tools: as for `prompt`; matters only where the template shows new messages differently with tools.
            previous: the assistant message that was sampled; only its tool calls' names and ids count.
            closed: the sampled ids end with a stop id; otherwise the end of the turn is added.
            last_id: that stop id. Matters where a turn ends with the marker of the next role and the model
                sampled the marker of another one: then both stand.

        Raises:
            TemplateRefusalError: the template takes no such messages.
            ModelError: the tokenizer cannot encode.
        """
        if not self.can_continue:
            raise ModelError(
                "the tokenizer cannot encode text, so there are no continuations",
                place="tokenizer",
                remedy="render the whole history with `prompt`",
            )
        turn = self._stand_in(previous)
        fitted = self.report.fit.messages([{"role": "user", "content": "-"}, turn, *messages])
        shown = self._shown(tools) if self.report.tail_needs_tools else []
        (fitted, shown), mark = self._encoder.protect((fitted, shown))
        ends = self._call_ends if "tool_calls" in turn else self._ends
        ids = self._encoder.encode(self._behind_turn(self._render(fitted, shown), ends), mark)
        return ids[1:] if closed and ids and self._was_sampled(ids[0], last_id) else ids

    def _stand_in(self, previous: Message) -> Message:
        """An assistant message that ends in the sentinel and whose calls the new messages can answer."""
        fit = self.report.fit
        calls = list(previous.get("tool_calls") or ()) if fit.tool_calls else []
        if not calls:
            return {"role": "assistant", "content": self._sentinel}
        asked = calls if fit.parallel_calls else calls[-1:]
        arguments = [*({} for _ in asked[1:]), {"x": self._sentinel}]
        copies = [
            {**call, "function": {"name": call["function"].get("name", ""), "arguments": argument}}
            for call, argument in zip(asked, arguments, strict=True)
        ]
        return {"role": "assistant", "content": "", "tool_calls": copies}

    def _behind_turn(self, text: str, ends: re.Pattern[str]) -> str:
        """The text from the end of the turn on."""
        tail = text[text.rindex(self._sentinel) + len(self._sentinel) :]
        found = ends.search(tail)
        return tail[found.start() :] if found else tail

    def _was_sampled(self, first: int, last_id: int | None) -> bool:
        """Whether the first id of a delta is the end that the model sampled itself."""
        if self.report.ends_with_next_role and last_id is not None:
            return first == last_id
        return first in self.stop_ids

    def _shown(self, tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        if not self.report.ignores_tools:
            return list(tools)
        if tools and not self._has_warned:
            self._has_warned = True
            _log.warning(
                "the chat template shows no tools: the model is not told of the %d tools it was given; "
                "give the tokenizer a chat template for tools",
                len(tools),
            )
        return []

    def _report_without_encoder(self) -> TemplateReport:
        question: list[Message] = [{"role": "user", "content": "-"}]
        start, bare = (
            str(self._tokenizer.decode(self._render.ids(question, generate=generate)))
            for generate in (True, False)
        )
        return TemplateReport(
            fit=TemplateFit(),
            generation_prompt=start.removeprefix(bare) if start.startswith(bare) else "",
            opens_reasoning=bool(REASONING_OPEN.search(start)),
            can_continue=False,
        )


def _template_source(tokenizer: Any) -> str | None:
    """The text of the chat template; of all of them where there are several, None where it is not known."""
    source = getattr(tokenizer, "chat_template", None)
    if isinstance(source, Mapping):
        return "\n".join(str(text) for text in source.values())
    return source if isinstance(source, str) else None


def _eos_ids(tokenizer: Any) -> set[int]:
    found = getattr(tokenizer, "eos_token_id", None)
    return set() if found is None else {found} if isinstance(found, int) else set(found)


def _pattern(ends: Sequence[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, ends)) or r"(?!)")

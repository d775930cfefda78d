"""Where the assistant's turns stand in one rendering of a whole conversation, in characters.

A second rendering, in which every assistant message is a sentinel, shows what stands between the turns; the
first one must then be that text with the turns in it, in exactly one way. So nothing depends on how a
template shows or rewrites a turn. A turn begins where its generation would have begun and ends with the
token that ends it. Knows text only, no tokens, and no template by name.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from slime.agent.messages import Message
from slime.agent.template_probe import (
    CALL_IDS,
    CALLED,
    MORE,
    SAID,
    TOLD,
    TOOL_NAME,
    USER,
    Renderer,
    common_start,
)
from slime.agent.template_report import TemplateReport
from slime.errors import DataError, ModelError

_ENDED = "zqendedqz"
_REASONING = ("reasoning_content", "reasoning", "thinking")
_REASONING_TAG = re.compile(r"</?[\w:]+>|\[/?\w+\]|◁/?\w+▷")


@dataclass(frozen=True)
class Turn:
    """Characters `start` to `end` of a rendering that are the assistant message at `position`."""

    position: int
    start: int
    end: int


@dataclass(frozen=True)
class _Header:
    """What stands before a turn: `base` in every rendering, `opening` where the rendering has it too."""

    base: str
    opening: str


@dataclass(frozen=True)
class _Frame:
    """A rendering without its turns: the text around them, and the end of each."""

    outside: list[str]
    ends: list[str]


class _MismatchError(Exception):
    """A rendering is not the frame with turns in it: number of the turn, and what is wrong."""

    def __init__(self, number: int, what: str) -> None:
        super().__init__(what)
        self.number, self.what = number, what


class TurnFinder:
    """Finds the turns in renderings of a chat template.

    Args:
        render: the template.
        report: what `probe` found about it.
        special: matches the tokenizer's special tokens.

    Attributes:
        structure: text in which every token that begins or ends a message occurs.

    Raises:
        ModelError: the template ends turns with no token, or the turns of a known conversation are not found.
    """

    structure: str

    def __init__(self, render: Renderer, report: TemplateReport, special: re.Pattern[str]) -> None:
        self._render = render
        self._report = report
        self._special = special
        self._sentinel = f"zq{secrets.token_hex(8)}"
        if not report.ends:
            raise ModelError(
                "the chat template ends an assistant's turn with no special token, so no model can learn "
                "where to stop",
                place="chat template",
                remedy="let the template write eos_token behind the assistant's messages",
            )
        self._ends = _any_of(report.next_roles or report.ends)
        self._call_ends = _any_of(report.next_roles or report.call_ends)
        exchange = [_message("user", USER), _message("assistant", SAID)]
        tail = self._text(exchange, generate=False).rpartition(SAID)[2]
        self._has_own_ends = special.search(tail) is not None
        self._headers = self._probe_headers()
        self.structure = self._check()

    def find(
        self, messages: Sequence[Message], tools: Sequence[Any], names: Sequence[str]
    ) -> tuple[str, list[Turn]]:
        """The rendering without a generation prompt, and the turns in it in order.

        Args:
            messages: in the form that the template takes.
            names: what errors call each message.

        Raises:
            TemplateRefusalError: the template takes no such messages.
            DataError: a turn cannot be found exactly; names the message.
        """
        text = self._render(messages, tools, generate=False)
        positions = [i for i, message in enumerate(messages) if message.get("role") == "assistant"]
        if not positions:
            return text, []
        frame = self._frame(messages, tools, positions, names)
        try:
            spans = _match(text, frame)
        except _MismatchError as error:
            at = self._culprit(messages, tools, positions, frame)
            raise _not_found(names[positions[error.number] if at is None else at], error.what) from error
        return text, [
            Turn(position, self._opened(text, start, _role_before(messages, position)), end)
            for position, (start, end) in zip(positions, spans, strict=True)
        ]

    def _frame(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any],
        positions: Sequence[int],
        names: Sequence[str],
    ) -> _Frame:
        shadow = self._shadow(messages, positions)
        text = self._render(shadow, tools, generate=False)
        firsts = [text.find(self._mark(position)) for position in positions]
        frame, done = _Frame([], []), 0
        for position, first, limit in zip(positions, firsts, [*firsts[1:], len(text)], strict=True):
            if not done <= first < limit:
                raise _not_found(names[position], "does not show it where the conversation has it")
            start = self._start(text, done, first, _role_before(messages, position))
            if start is None:
                raise _not_found(names[position], "does not show where it begins")
            found = self._end(text, position, limit, calls="tool_calls" in shadow[position])
            if found is None:
                raise _not_found(names[position], "does not show where it ends")
            frame.outside.append(text[done:start])
            frame.ends.append(found[1])
            done = found[0] + len(found[1])
        frame.outside.append(text[done:])
        return frame

    def _shadow(self, messages: Sequence[Message], positions: Sequence[int]) -> list[Message]:
        shadow = list(messages)
        for position in positions:
            shadow[position] = self._stand_in(messages[position], position)
        return shadow

    def _culprit(
        self, messages: Sequence[Message], tools: Sequence[Any], positions: Sequence[int], frame: _Frame
    ) -> int | None:
        """The first message that alone changes the text around the turns; None if it takes several."""
        for position in positions:
            shadow = self._shadow(messages, [other for other in positions if other != position])
            try:
                _match(self._render(shadow, tools, generate=False), frame)
            except _MismatchError:
                return position
        return None

    def _start(self, text: str, done: int, first: int, before: str | None) -> int | None:
        """Where the turn begins whose sentinel is at `first`."""
        header = self._headers.get(before) or self._headers.get(None)
        found = text.rfind(header.base, done, first) if header else -1
        return found + len(header.base) if header and found >= 0 else None

    def _end(self, text: str, position: int, limit: int, *, calls: bool) -> tuple[int, str] | None:
        """Where the end of a turn begins, and the token that ends it if the model samples it."""
        mark = self._mark(position)
        pattern = self._call_ends if calls else self._ends
        last = text.rindex(mark, 0, limit) + len(mark)
        found = pattern.search(text, last, limit)
        if self._report.ends_with_next_role:
            return self._end_before(text, last, limit, found)
        return (found.start(), found.group()) if found else None

    def _end_before(
        self, text: str, last: int, limit: int, next_role: re.Match[str] | None
    ) -> tuple[int, str] | None:
        """As `_end`, where the probe found no end that turns have in common.

        They end with the marker of the next message, or with one token in history and another at the end.
        """
        if next_role is None and limit < len(text):
            return None
        behind = next_role.start() if next_role else limit
        own = list(self._special.finditer(text, last, behind))
        if own and self._has_own_ends:
            return own[-1].start(), own[-1].group()
        sampled = next_role is not None and next_role.group() in self._report.ends
        return behind, next_role.group() if next_role and sampled else ""

    def _opened(self, text: str, start: int, before: str | None) -> int:
        """`start`, behind what the generation prompt would have opened there (reasoning, or none of it)."""
        opening = (self._headers.get(before) or self._headers[None]).opening
        return start + len(opening) if text.startswith(opening, start) else start

    def _mark(self, position: int) -> str:
        return f"{self._sentinel}x{position}qz"

    def _stand_in(self, message: Message, position: int) -> Message:
        """The message with a sentinel instead of all that it says; calls keep their names and ids."""
        mark = self._mark(position)
        kept = {key: value for key, value in message.items() if key not in _REASONING}
        calls = message.get("tool_calls")
        if not calls:
            return kept | {"content": self._report.fit.content(mark)}
        arguments: Any = {"x": mark} if self._report.fit.arguments == "object" else f'{{"x": "{mark}"}}'
        copies = [{**call, "function": {**call["function"], "arguments": arguments}} for call in calls]
        return kept | {"content": self._report.fit.content(""), "tool_calls": copies}

    def _probe_headers(self) -> dict[str | None, _Header]:
        """By the role of the message before; None for any role that is not listed."""
        user = self._header([_message("user", USER)], USER)
        headers: dict[str | None, _Header] = {"user": user}
        bare = self._text([_message("user", USER)], generate=False).rpartition(USER)[2]
        generation = user.base[common_start(bare, user.base, self._special) :]
        if generation:
            headers[None] = _Header(generation, user.opening)
        if self._report.fit.tool_role:
            told = [
                self._header(_told(*way), TOLD) for way in zip(CALL_IDS, (TOOL_NAME, "other"), strict=True)
            ]
            headers["tool"] = _Header(_common_end(*(header.base for header in told)), told[0].opening)
        return headers

    def _header(self, context: list[Message], mark: str) -> _Header:
        said = _message("assistant", SAID)
        prompt = self._text(context).rpartition(mark)[2]
        alone, followed = (
            self._text([*context, said, *more], generate=False).partition(SAID)[0].rpartition(mark)[2]
            for more in ([], [_message("user", MORE)])
        )
        base = prompt[: min(common_start(prompt, begun, self._special) for begun in (alone, followed))]
        opening = prompt[len(base) :]
        if _REASONING_TAG.sub("", opening).strip():
            raise _not_exact(f"its generation prompt ends with {opening!r}, a turn begins otherwise")
        return _Header(base, opening)

    def _text(self, messages: Sequence[Message], *, generate: bool = True) -> str:
        return self._render(self._report.fit.messages(messages), generate=generate)

    def _check(self) -> str:
        """Find the turns of a conversation of which everything is known; returns the text around them."""
        first = [_message("user", USER), _message("assistant", SAID), _message("user", MORE)]
        history = [*first, *_told(CALL_IDS[0], TOOL_NAME)[1:], _message("assistant", _ENDED)]
        around = within = ""
        for length in (2, 4, 6):
            fitted = self._report.fit.messages(history[:length])
            text, turns = self.find(fitted, (), ["a message of the check"] * len(fitted))
            prompt, before = self._text(history[: length - 1]), text[: turns[-1].start]
            if not prompt.startswith(before):
                raise _not_exact(f"a turn follows {before[-60:]!r}, its generation {prompt[-60:]!r}")
            around += "".join(piece for piece, turn in pieces(text, turns) if turn is None)
            within += "".join(piece for piece, turn in pieces(text, turns) if turn is not None)
        mixed = [mark for mark in (SAID, CALLED, _ENDED) if mark in around]
        mixed += [mark for mark in (USER, MORE, TOLD) if mark in within]
        if mixed:
            raise _not_exact(f"they are mixed in {within[:200]!r}")
        return around


def pieces(text: str, turns: Sequence[Turn]) -> Iterator[tuple[str, Turn | None]]:
    """The text cut at the turns, in order; each piece with its turn, or None between turns."""
    done = 0
    for turn in turns:
        yield text[done : turn.start], None
        yield text[turn.start : turn.end], turn
        done = turn.end
    yield text[done:], None


def _match(text: str, frame: _Frame) -> list[tuple[int, int]]:
    """Spans of the turns in a text that is the frame with turns in it, in exactly one way."""
    between = [end + outside for end, outside in zip(frame.ends, frame.outside[1:], strict=True)]
    start, found = len(frame.outside[0]), []
    if not text.startswith(frame.outside[0]):
        raise _MismatchError(0, "shows what is before it differently because of what it says")
    for number, piece in enumerate(between):
        at = text.find(piece, start) if number + 1 < len(between) else len(text) - len(piece)
        if at < start or not text.startswith(piece, at):
            raise _MismatchError(number, "shows what is behind it differently because of what it says")
        found.append((start, at))
        start = at + len(piece)
    for number in reversed(range(len(between) - 1)):
        if text.rfind(between[number], 0, found[number + 1][1]) != found[number][1]:
            raise _MismatchError(number, "shows it so that it may end in several places")
    return [(start, at + len(end)) for (start, at), end in zip(found, frame.ends, strict=True)]


def _role_before(messages: Sequence[Message], position: int) -> str | None:
    return str(messages[position - 1].get("role")) if position else None


def _told(identifier: str, name: str) -> list[Message]:
    """A user message, a call and the answer to it."""
    function = {"name": name, "arguments": {"x": CALLED}}
    call = {"id": identifier, "type": "function", "function": function}
    return [
        _message("user", USER),
        _message("assistant", "", tool_calls=[call]),
        _message("tool", TOLD, tool_call_id=identifier),
    ]


def _message(role: str, content: str, **more: Any) -> Message:
    return {"role": role, "content": content, **more}


def _any_of(texts: Sequence[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, texts)))


def _common_end(one: str, two: str) -> str:
    pairs = enumerate(zip(reversed(one), reversed(two), strict=False))
    length = next((i for i, (a, b) in pairs if a != b), min(len(one), len(two)))
    return one[len(one) - length :]


def _not_found(name: str, what: str) -> DataError:
    return DataError(
        f"the assistant's turn cannot be told from the rest: the chat template {what}",
        place=name,
        remedy="leave the conversation out, or give the tokenizer another chat template",
    )


def _not_exact(what: str) -> ModelError:
    return ModelError(
        f"the chat template's rendering does not show which text is the assistant's: {what}",
        place="chat template",
        remedy="give the tokenizer a chat template in which turns begin as their generations do",
    )

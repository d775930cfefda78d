"""Text that arrives in pieces, read by coroutines as if it were whole.

A coroutine (`Steps`) yields where it needs more text; `Reader.push` brings it and the owner resumes. Every
method here gives the same however the text was cut. Invariant: only what may still become a marker is
looked at twice, so N characters cost O(N). Knows no format.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from typing import TypeAlias, TypeVar

T = TypeVar("T")
Steps: TypeAlias = Generator[None, None, T]
Sink: TypeAlias = Callable[[str], object]

SPACE = re.compile(r"\s*")


class Markers:
    """Literals to look for; none may lie within another one."""

    def __init__(self, *literals: str) -> None:
        self._pattern = re.compile("|".join(map(re.escape, literals)) if literals else r"(?!)")
        self._beginnings = frozenset(text[:n] for text in literals for n in range(1, len(text)))
        self._reach = max(map(len, literals), default=1) - 1

    def find(self, text: str, start: int, *, final: bool) -> tuple[int, str]:
        """Up to where `text` surely holds no marker; and the marker there, or ""."""
        match = self._pattern.search(text, start)
        if match:
            return match.start(), match.group()
        if not final:
            for at in range(max(start, len(text) - self._reach), len(text)):
                if text[at:] in self._beginnings:
                    return at, ""
        return len(text), ""


class Reader:
    """The text that was pushed and not yet consumed."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._final = False
        self._tape: list[str] | None = None

    def push(self, text: str) -> None:
        """Append `text`; what was consumed is forgotten."""
        self._text = self._text[self._at :] + text
        self._at = 0

    def close(self) -> None:
        """There is no more text."""
        self._final = True

    def record(self, first: str = "") -> None:
        """Begin to keep what is consumed, after `first`."""
        self._tape = [first]

    def recorded(self) -> str:
        """What was consumed since `record`, which ends."""
        tape, self._tape = self._tape or [], None
        return "".join(tape)

    def peek(self) -> Steps[str]:
        """The next character, or "" at the end."""
        while self._at >= len(self._text) and not self._final:
            yield
        return self._text[self._at : self._at + 1]

    def run(self, characters: re.Pattern[str], sink: Sink | None = None) -> Steps[None]:
        """Consume while `characters` (a pattern that repeats one class) match; the pieces go to `sink`."""
        while True:
            match = characters.match(self._text, self._at)
            self._consume(match.end() if match else self._at, sink)
            if self._at < len(self._text) or self._final:
                return
            yield

    def word(self, characters: re.Pattern[str]) -> Steps[str]:
        """Like `run`; gives what was consumed."""
        pieces: list[str] = []
        yield from self.run(characters, pieces.append)
        return "".join(pieces)

    def take(self, count: int, sink: Sink) -> Steps[None]:
        """Consume `count` characters, fewer at the end."""
        for _ in range(count):
            yield from self.peek()
            self._consume(min(self._at + 1, len(self._text)), sink)

    def ahead(self, *literals: str) -> Steps[str]:
        """Which of the literals comes next, or ""."""
        reach = max(map(len, literals))
        while True:
            text = self._text[self._at : self._at + reach]
            for literal in literals:
                if text.startswith(literal):
                    return literal
            if self._final or not any(literal.startswith(text) for literal in literals):
                return ""
            yield

    def accept(self, *literals: str) -> Steps[str]:
        """Consume the literal that comes next and give it, or ""."""
        literal = yield from self.ahead(*literals)
        self._consume(self._at + len(literal), None)
        return literal

    def up_to(self, markers: Markers, sink: Sink) -> Steps[str]:
        """Pass the text before the next marker to `sink` and give the marker, or "" at the end."""
        while True:
            end, marker = markers.find(self._text, self._at, final=self._final)
            self._consume(end, sink)
            if marker or self._final:
                return marker
            yield

    def past(self, markers: Markers, sink: Sink) -> Steps[str]:
        """Like `up_to`; consumes the marker."""
        marker = yield from self.up_to(markers, sink)
        self._consume(self._at + len(marker), None)
        return marker

    def _consume(self, end: int, sink: Sink | None) -> None:
        if end == self._at:
            return
        piece, self._at = self._text[self._at : end], end
        if self._tape is not None:
            self._tape.append(piece)
        if sink is not None:
            sink(piece)

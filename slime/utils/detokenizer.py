"""Text of a growing token list: incremental detokenisation, and stop strings found in it.

Invariant: a push decodes a window of a few tokens, whatever came before; a streamed text never ends within a
character or within what may become a stop string. Knows nothing of requests or engines.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

CONTEXT_TOKENS = 5
"""Prompt tokens in the first window, for tokenizers that decode a token by its left neighbour."""
MAX_HELD_TOKENS = 16
"""Bytes that make no character after so many tokens are given out as U+FFFD."""
MOST_BYTES = 4
"""Bytes, hence tokens, of the longest character."""
INCOMPLETE = "�"


class IncrementalDecoder:
    """Turns pushed token ids into text, each character as soon as it is complete."""

    def __init__(self, tokenizer: Any, context: Sequence[int], **options: bool) -> None:
        """`options` go to the tokenizer's `decode`: `skip_special_tokens` and the like."""
        self._tokenizer = tokenizer
        self._options = options
        self._window = list(context[-CONTEXT_TOKENS:])
        self._given = len(self._window)

    def push(self, ids: Sequence[int]) -> str:
        """Text that `ids` complete; may be empty."""
        self._window.extend(ids)
        for end in range(len(self._window), max(self._given, len(self._window) - MOST_BYTES), -1):
            new = self._text(end)
            if not new.endswith(INCOMPLETE):
                return self._give(new, end)
        end = len(self._window)
        return self._give(self._text(end), end) if end - self._given > MAX_HELD_TOKENS else ""

    def pending(self) -> str:
        """Text of the ids held back: an unfinished character, as U+FFFD."""
        return self._text(len(self._window)) if len(self._window) > self._given else ""

    def _text(self, end: int) -> str:
        """Text of the window's tokens up to `end` that was not given out."""
        before = self._decode(self._window[: self._given])
        return self._decode(self._window[:end])[len(before) :]

    def _give(self, text: str, end: int) -> str:
        self._window = self._window[self._given :]
        self._given = end - self._given
        return text

    def _decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, **self._options)
        return text


class StopStrings:
    """Looks for stop strings in a text that grows at its end."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._longest = max(map(len, self._stops), default=0)

    def find(self, text: str, new: int) -> tuple[str, int] | None:
        """The earliest stop string that ends in the last `new` characters, and where it begins."""
        start = max(0, len(text) - new - self._longest + 1)
        found = [(text.find(stop, start), stop) for stop in self._stops]
        hits = [(position, stop) for position, stop in found if position >= 0]
        if not hits:
            return None
        position, stop = min(hits, key=lambda hit: (hit[0], -len(hit[1])))
        return stop, position

    def safe_length(self, text: str) -> int:
        """Length of `text` without the longest tail that may yet become a stop string."""
        for size in range(min(self._longest - 1, len(text)), 0, -1):
            tail = text[-size:]
            if any(stop.startswith(tail) for stop in self._stops):
                return len(text) - size
        return len(text)

"""The raw text of a custom tool's input, taken out of the JSON arguments while they arrive.

Invariant: the pieces that `feed` and `finish` give join to the same text however the arguments were cut, and
nothing that was given is taken back. Knows no protocol.
"""

from __future__ import annotations

import json
import re
from typing import Literal

from slime.agent.adapters.openai_body import read_arguments

_OPENING = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_LONGEST_OPENING = 64
_PIECE = re.compile(
    r'[^"\\]+'
    r"|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
    r"|\\u[0-9a-fA-F]{4}"
    r"|\\[^u]",
    re.DOTALL,
)
# An escape that more text could still complete, the second half of a surrogate pair among them.
_UNFINISHED = re.compile(
    r"\\(?:u(?:[0-9a-fA-F]{0,3}|[dD][89abAB][0-9a-fA-F]{2}(?:\\(?:u[0-9a-fA-F]{0,3})?)?))?\Z"
)


class FreeformInput:
    """The input of one call, whose arguments should be ``{"input": "..."}``."""

    def __init__(self) -> None:
        self._given: list[str] = []
        self._waiting = ""
        self._state: Literal["opening", "inside", "closed", "other"] = "opening"

    @property
    def text(self) -> str:
        """What was given so far."""
        return "".join(self._given)

    def feed(self, arguments: str) -> str:
        """More of the arguments; gives more of the input."""
        if self._state in ("closed", "other"):
            return ""
        self._waiting += arguments
        if self._state == "opening":
            self._open()
        return self._give(self._decoded()) if self._state == "inside" else ""

    def finish(self, arguments: str) -> str:
        """The whole arguments; gives the rest of the input: what was sampled, where it has not that form."""
        if self._state == "closed":
            return ""
        if self._state == "inside":
            return self._give(self._waiting)
        value = read_arguments(arguments)
        said = value.get("input") if isinstance(value, dict) else None
        return self._give(said if isinstance(said, str) else arguments)

    def _give(self, text: str) -> str:
        self._given.append(text)
        return text

    def _open(self) -> None:
        found = _OPENING.match(self._waiting)
        if found and found.end() <= _LONGEST_OPENING:
            self._state, self._waiting = "inside", self._waiting[found.end() :]
        elif len(self._waiting) >= _LONGEST_OPENING:
            self._state, self._waiting = "other", ""

    def _decoded(self) -> str:
        """Takes from what waits all that is certain."""
        text, place, pieces = self._waiting, 0, list[str]()
        while place < len(text) and not _UNFINISHED.match(text, place):
            if text[place] == '"':
                self._state, place = "closed", len(text)
                break
            piece = _PIECE.match(text, place)
            pieces.append(_unescaped(piece[0]) if piece else text[place])
            place = piece.end() if piece else place + 1
        self._waiting = text[place:]
        return "".join(pieces)


def _unescaped(piece: str) -> str:
    if not piece.startswith("\\"):
        return piece
    try:
        said = str(json.loads(f'"{piece}"'))
    except json.JSONDecodeError:
        return piece
    return "\N{REPLACEMENT CHARACTER}" if "\ud800" <= said <= "\udfff" else said

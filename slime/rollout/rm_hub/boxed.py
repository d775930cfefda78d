r"""Finding the last ``\boxed{...}`` or ``\fbox{...}`` of a text.

Invariant: braces are matched, so boxes may nest; a box that is never closed is none; ``\{`` and ``\}`` do not
count. Linear in the length of the text, whatever it holds. Knows no mathematics.
"""

from __future__ import annotations

import re

_OPENER = r"\\(?:boxed|fbox)\s*\{"
_TOKENS = re.compile(rf"{_OPENER}|\\(?!{_OPENER}).|[{{}}]", re.DOTALL)
_BOX_START = re.compile(_OPENER)


def last_boxed_only_string(text: str) -> str | None:
    r"""The last complete box, command and braces included, or None."""
    last: tuple[int, int] | None = None
    open_braces: list[int | None] = []
    for token in _TOKENS.finditer(text):
        if token[0] == "}":
            start = open_braces.pop() if open_braces else None
            if start is not None and (last is None or start > last[0]):
                last = start, token.end()
        elif token[0].endswith("{") and token[0] != "\\{":
            open_braces.append(None if token[0] == "{" else token.start())
    return None if last is None else text[slice(*last)]


def remove_boxed(box: str | None) -> str | None:
    r"""The content of a box as `last_boxed_only_string` gives it; None for anything else."""
    opener = _BOX_START.match(box) if box else None
    if box is None or opener is None or _closing_brace(box, opener.end()) != len(box) - 1:
        return None
    return box[opener.end() : -1]


def boxed_answer(text: str) -> str | None:
    """The content of the last complete box, or None."""
    return remove_boxed(last_boxed_only_string(text))


def _closing_brace(text: str, start: int) -> int | None:
    r"""Position of the brace that closes the one before `start`; ``\{`` and ``\}`` do not count."""
    depth, position = 1, start
    while position < len(text):
        if text[position] == "\\":
            position += 1
        elif text[position] == "{":
            depth += 1
        elif text[position] == "}":
            depth -= 1
            if depth == 0:
                return position
        position += 1
    return None

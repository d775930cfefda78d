r"""Finding the last ``\boxed{...}`` or ``\fbox{...}`` of a text.

Invariant: braces are counted, so boxes may nest; a box that is never closed is none. Knows no mathematics.
"""

from __future__ import annotations

import re

_OPENERS = re.compile(r"\\(?:boxed|fbox)\s*\{")


def last_boxed_only_string(text: str) -> str | None:
    r"""The last complete box, command and braces included, or None."""
    for opener in reversed(list(_OPENERS.finditer(text))):
        end = _closing_brace(text, opener.end())
        if end is not None:
            return text[opener.start() : end + 1]
    return None


def remove_boxed(box: str | None) -> str | None:
    r"""The content of a box as `last_boxed_only_string` gives it; None for anything else."""
    opener = _OPENERS.match(box) if box else None
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

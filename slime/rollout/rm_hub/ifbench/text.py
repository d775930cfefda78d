"""Words, sentences, paragraphs and counts of a text, for checkers of instructions.

Sentences end with ``.``, ``!`` or ``?`` (or a full stop of East Asian writing) before white space, except
after common abbreviations, initials and inside numbers; no trained model is used. Pure functions.
"""

from __future__ import annotations

import re
import string

_WORD = re.compile(r"\w+")
_ENDING = re.compile(r"([.!?…]+[\"'”’)\]*_]*)\s+|([。！？]+[」』”]*)\s*|\n\s*\n+")
_ABBREVIATION = re.compile(
    r"(?:^|[\s(])(?:mr|mrs|ms|dr|prof|st|jr|sr|vs|etc|inc|ltd|co|corp|no|fig|e\.g|i\.e|u\.s|a\.m|p\.m|(?-i:[A-Z]))\.$",
    re.IGNORECASE,
)
PUNCTUATION = string.punctuation


def words(text: str) -> list[str]:
    """Runs of letters, digits and underscores."""
    return _WORD.findall(text)


def spaced_words(text: str) -> list[str]:
    """Words between white space, lower case, without punctuation; what was punctuation only is left out."""
    return text.lower().translate(str.maketrans("", "", PUNCTUATION)).split()


def sentences(text: str) -> list[str]:
    """Sentences in order, without white space around them."""
    found, start = [], 0
    for ending in _ENDING.finditer(text):
        piece = text[start : ending.end()].strip()
        if ending[1] == "." and _ABBREVIATION.search(piece):
            continue
        found.append(piece)
        start = ending.end()
    found.append(text[start:].strip())
    return [sentence for sentence in found if words(sentence)]


def count_phrase(text: str, phrase: str) -> int:
    """How often a word or phrase occurs as a whole, in any case."""
    return len(re.findall(rf"(?<!\w){re.escape(phrase.strip())}(?!\w)", text, re.IGNORECASE))


def compares(count: int, relation: str | None, wanted: int) -> bool:
    """Whether a count is as wanted: ``less than``, ``at least`` (the default), ``at most`` or ``exactly``.

    Raises:
        ValueError: another relation.
    """
    match (relation or "at least").strip().lower():
        case "at least":
            return count >= wanted
        case "less than":
            return count < wanted
        case "at most":
            return count <= wanted
        case "exactly" | "equal to":
            return count == wanted
    raise ValueError(f"unknown relation {relation!r}")

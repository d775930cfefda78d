"""The reward of multiple-choice questions (GPQA): which letter does the response end on.

Pure functions of a response, a label and metadata; they run in a worker process. Invariant: letters are
compared where both are known, texts only otherwise.
"""

from __future__ import annotations

import re
import string
from collections.abc import Mapping, Sequence
from typing import Any

from slime.rollout.rm_hub.verdict import Invalid

METADATA_KEYS = ("choices", "valid_letters", "correct_letter", "correct_answer", "answer_text")
_DEFAULT_LETTERS = "ABCDEFGH"
_MARK = r"(?:\*\*|\\boxed\{|\\text\{|[\(\[{\"'`$])*\s*"
_PATTERNS = (
    rf"(?:final\s+answer|answer|option|choice)\s*(?:is|:|=)\s*(?:option|choice)?\s*:?\s*{_MARK}([A-Z])(?![A-Za-z])",
    rf"{_MARK}\b([A-Z])\b[\)\]}}\"'`*.$]*\s+is\s+(?:the\s+)?(?:correct|right|final\s+answer)",
    rf"(?:answer|option|choice)\s+{_MARK}([A-Z])(?![A-Za-z])",
)
_EXTRACTORS = tuple(re.compile(pattern, re.IGNORECASE) for pattern in _PATTERNS)
_STANDALONE = re.compile(r"(?<![A-Za-z0-9'])([A-Z])(?![A-Za-z0-9'])")
_NOT_WORD = re.compile(r"[^\w.\-+]+")


def compute_gpqa_reward(
    response: str | None, label: str | int | None, metadata: Mapping[str, Any] | None = None
) -> float:
    """The number alone of `gpqa_check`."""
    verdict = gpqa_check(response or "", label, metadata)
    return float(verdict.reward) if isinstance(verdict, Invalid) else verdict


def gpqa_check(
    response: str, label: str | int | None, metadata: Mapping[str, Any] | None = None
) -> float | Invalid:
    """1.0 if the response chooses the right option, else 0.0.

    Args:
        label: a letter, an index into the choices, or the text of a choice.
        metadata: may hold `choices` (a list, or a mapping from letters), `valid_letters`, `correct_letter`,
            `correct_answer` and `answer_text`.

    Returns:
        `Invalid` for a response that names no letter and not the answer's text.

    Raises:
        ValueError: nothing says which option is right.
    """
    metadata = metadata or {}
    choices = _choices(metadata.get("choices"), metadata.get("valid_letters"))
    letters = _letters(metadata.get("valid_letters"), choices)
    correct = _correct_letter(label, metadata, letters, choices)
    texts = _correct_texts(label, metadata, choices, correct)
    if correct is None and not texts:
        raise ValueError(f"label {label!r} and metadata say not which option is right")
    answer = response.rpartition("</think>")[2]
    chosen = extract_letter(answer, letters)
    if chosen is not None and correct is not None:
        return float(chosen == correct)
    normal = f" {_normalised(answer)} "
    if any(f" {text} " in normal for text in texts):
        return 1.0
    return 0.0 if chosen is not None else Invalid(0.0, "no_choice")


def extract_letter(text: str, letters: Sequence[str]) -> str | None:
    """The letter that a text says is its answer: the last such phrase, else the last capital by itself."""
    for extractor in _EXTRACTORS:
        found = [letter for match in extractor.finditer(text) if (letter := match[1].upper()) in letters]
        if found:
            return found[-1]
    alone = [letter for letter in _STANDALONE.findall(text) if letter in letters]
    return alone[-1] if alone else None


def _choices(given: Any, valid: Any) -> dict[str, str]:
    if isinstance(given, Mapping):
        return {str(letter).strip().upper(): str(text) for letter, text in given.items()}
    if isinstance(given, Sequence) and not isinstance(given, str):
        names = [str(letter).strip().upper() for letter in valid or string.ascii_uppercase]
        return dict(zip(names, map(str, given), strict=False))
    return {}


def _letters(valid: Any, choices: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(str(letter).strip().upper() for letter in valid or choices or _DEFAULT_LETTERS)


def _correct_letter(
    label: Any, metadata: Mapping[str, Any], letters: Sequence[str], choices: Mapping[str, str]
) -> str | None:
    """The right letter by metadata, else by the label: a letter, an index, or the text of a choice."""
    for candidate in (metadata.get("correct_letter"), label):
        text = str(candidate).strip().strip("()[].").upper() if candidate is not None else ""
        if text in letters:
            return text
    if label is not None and str(label).strip().isdecimal() and int(str(label)) < len(letters):
        return letters[int(str(label))]
    wanted = {_normalised(str(text)) for text in (metadata.get("correct_answer"), label) if text is not None}
    named = [letter for letter, text in choices.items() if _normalised(text) in wanted]
    answer = str(metadata.get("correct_answer") or "").strip().upper()
    return named[0] if named else (answer if answer in letters else None)


def _correct_texts(
    label: Any, metadata: Mapping[str, Any], choices: Mapping[str, str], correct: str | None
) -> set[str]:
    """Normalised texts of the right answer; single characters say too little to look for."""
    given = [metadata.get("correct_answer"), metadata.get("answer_text"), choices.get(correct or "")]
    if correct is None:
        given.append(label)
    return {text for item in given if item is not None and len(text := _normalised(str(item))) > 1}


def _normalised(text: str) -> str:
    return " ".join(_NOT_WORD.sub(" ", text.lower()).split()).strip(".")

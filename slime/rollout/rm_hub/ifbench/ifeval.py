"""Checkers of the 25 instructions of IFEval (Zhou et al., 2023, arXiv:2311.07911), by id.

Each is ``(response, **kwargs of the data set) -> followed``. Written from the paper's descriptions; sentences
and languages are found without trained models. Pure functions.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence

from slime.rollout.rm_hub.ifbench.languages import is_language
from slime.rollout.rm_hub.ifbench.text import PUNCTUATION, compares, count_phrase, sentences, words

Checker = Callable[..., bool]
_BULLET = re.compile(r"^[ \t]*(?:\*(?!\*)|-)[ \t]*\S", re.MULTILINE)
_HIGHLIGHT = re.compile(r"\*\*([^*\n]+)\*\*|\*([^*\n]+)\*")
_DIVIDER = re.compile(r"\s?\*\*\*\s?")
_FENCE = re.compile(r"^```(?:json|JSON|Json)?\s*|\s*```$")
_OPTIONS = ("my answer is yes.", "my answer is no.", "my answer is maybe.")


def existence(response: str, *, keywords: Sequence[str]) -> bool:
    """All keywords occur."""
    return all(re.search(re.escape(word), response, re.IGNORECASE) for word in keywords)


def frequency(response: str, *, keyword: str, frequency: int, relation: str | None = None) -> bool:
    """The keyword occurs so often."""
    found = re.findall(re.escape(keyword.strip()), response, re.IGNORECASE)
    return compares(len(found), relation, frequency)


def forbidden_words(response: str, *, forbidden_words: Sequence[str]) -> bool:
    """None of the words occurs."""
    return not any(count_phrase(response, word) for word in forbidden_words)


def letter_frequency(
    response: str, *, letter: str, let_frequency: int, let_relation: str | None = None
) -> bool:
    """The letter occurs so often, in any case."""
    return compares(response.lower().count(letter.strip().lower()), let_relation, let_frequency)


def response_language(response: str, *, language: str) -> bool:
    """The response is in this language."""
    return is_language(response, language)


def number_sentences(response: str, *, num_sentences: int, relation: str | None = None) -> bool:
    """So many sentences."""
    return compares(len(sentences(response)), relation, num_sentences)


def number_paragraphs(response: str, *, num_paragraphs: int) -> bool:
    """Exactly so many paragraphs, divided by ``***``; none in the middle may be empty."""
    parts = [part.strip() for part in _DIVIDER.split(response)]
    return all(parts[1:-1]) and sum(map(bool, parts)) == num_paragraphs


def number_words(response: str, *, num_words: int, relation: str | None = None) -> bool:
    """So many words."""
    return compares(len(words(response)), relation, num_words)


def nth_paragraph_first_word(
    response: str, *, num_paragraphs: int, nth_paragraph: int, first_word: str
) -> bool:
    """Exactly so many paragraphs, divided by blank lines, and the n-th begins with this word."""
    parts = [part.strip() for part in re.split(r"\n\n", response)]
    full = [part for part in parts if part]
    if len(full) != num_paragraphs or not 1 <= nth_paragraph <= len(full):
        return False
    first = full[nth_paragraph - 1].split()[0].lstrip(PUNCTUATION)
    return re.split(f"[{re.escape(PUNCTUATION)}]", first)[0].lower() == first_word.strip().lower()


def number_placeholders(response: str, *, num_placeholders: int) -> bool:
    """At least so many placeholders in square brackets."""
    return len(re.findall(r"\[[^\[\]]*\]", response)) >= num_placeholders


def postscript(response: str, *, postscript_marker: str = "P.S.") -> bool:
    """A postscript with this marker."""
    marker = postscript_marker.strip()
    letters = [letter for letter in marker if letter.isalpha()]
    pattern = r"\.\s?".join(letters) + r"\.?" if set(marker.upper()) <= set("PS. ") else re.escape(marker)
    return re.search(pattern, response, re.IGNORECASE) is not None


def number_bullet_lists(response: str, *, num_bullets: int) -> bool:
    """Exactly so many bullet points, ``*`` or ``-``."""
    return len(_BULLET.findall(response)) == num_bullets


def constrained_response(response: str) -> bool:
    """One of the three fixed answers."""
    return any(option in response.lower() for option in _OPTIONS)


def number_highlighted_sections(response: str, *, num_highlights: int) -> bool:
    """At least so many parts in ``*`` or ``**``."""
    found = ["".join(groups).strip() for groups in _HIGHLIGHT.findall(response)]
    return sum(map(bool, found)) >= num_highlights


def multiple_sections(response: str, *, section_spliter: str, num_sections: int) -> bool:
    """At least so many sections, each begun by the word and a number."""
    return len(re.findall(rf"\s?{re.escape(section_spliter.strip())}\s?\d+\s?", response)) >= num_sections


def json_format(response: str) -> bool:
    """All of it is JSON, in a fence or not."""
    try:
        json.loads(_FENCE.sub("", _FENCE.sub("", response.strip())))
    except (ValueError, RecursionError):
        return False
    return True


def title(response: str) -> bool:
    """A title in double angular brackets."""
    return any(found.strip() for found in re.findall(r"<<([^\n<>]+)>>", response))


def two_responses(response: str) -> bool:
    """Two different answers, divided by six asterisks."""
    parts = [part.strip() for part in response.split("******")]
    full = [part for part in parts if part]
    return all(parts[1:-1]) and len(full) == 2 and full[0] != full[1]


def repeat_prompt(response: str, *, prompt_to_repeat: str) -> bool:
    """The prompt comes first, word for word."""
    return response.strip().lower().startswith(prompt_to_repeat.strip().lower())


def end_checker(response: str, *, end_phrase: str) -> bool:
    """The response ends with this phrase."""
    return response.strip().strip('"').lower().endswith(end_phrase.strip().lower())


def quotation(response: str) -> bool:
    """All of it is in double quotes."""
    text = response.strip()
    return len(text) > 1 and text[0] == text[-1] == '"'


def capital_word_frequency(
    response: str, *, capital_frequency: int, capital_relation: str | None = None
) -> bool:
    """So many words in capitals."""
    found = re.findall(r"\w+(?:['’-]\w+)*", response)
    return compares(sum(word.isupper() for word in found), capital_relation, capital_frequency)


def english_capital(response: str) -> bool:
    """English, in capitals only."""
    return response.isupper() and is_language(response, "en")


def english_lowercase(response: str) -> bool:
    """English, without capitals."""
    return response.islower() and is_language(response, "en")


def no_comma(response: str) -> bool:
    """No comma."""
    return "," not in response


CHECKERS: dict[str, Checker] = {
    "keywords:existence": existence,
    "keywords:frequency": frequency,
    "keywords:forbidden_words": forbidden_words,
    "keywords:letter_frequency": letter_frequency,
    "language:response_language": response_language,
    "length_constraints:number_sentences": number_sentences,
    "length_constraints:number_paragraphs": number_paragraphs,
    "length_constraints:number_words": number_words,
    "length_constraints:nth_paragraph_first_word": nth_paragraph_first_word,
    "detectable_content:number_placeholders": number_placeholders,
    "detectable_content:postscript": postscript,
    "detectable_format:number_bullet_lists": number_bullet_lists,
    "detectable_format:constrained_response": constrained_response,
    "detectable_format:number_highlighted_sections": number_highlighted_sections,
    "detectable_format:multiple_sections": multiple_sections,
    "detectable_format:json_format": json_format,
    "detectable_format:title": title,
    "combination:two_responses": two_responses,
    "combination:repeat_prompt": repeat_prompt,
    "startend:end_checker": end_checker,
    "startend:quotation": quotation,
    "change_case:capital_word_frequency": capital_word_frequency,
    "change_case:english_capital": english_capital,
    "change_case:english_lowercase": english_lowercase,
    "punctuation:no_comma": no_comma,
}
"""Instruction id -> checker."""

"""Checkers of instructions of IFBench about layout, repetition and fixed tasks, by id.

As `constraints`: each is ``(response, **kwargs of the data set) -> followed``. Pure functions.
"""

from __future__ import annotations

import csv
import itertools
import re
from collections.abc import Sequence

from slime.rollout.rm_hub.ifbench.ifeval import Checker
from slime.rollout.rm_hub.ifbench.text import PUNCTUATION, sentences, spaced_words, words

_EMOJI = re.compile("[\U0001f000-\U0001faff\u2600-\u27bf\u2b00-\u2bff\u203c\u2049\u231a-\u23ff\u3030]")
_PAIRS = {")": "(", "]": "[", "}": "{"}


def nested_parentheses(response: str) -> bool:
    """Brackets, properly closed, at least five deep."""
    stack: list[tuple[str, int]] = []
    for mark in response:
        if mark in "([{":
            stack.append((mark, 1))
        elif mark in _PAIRS:
            opening, height = stack.pop() if stack else ("", 0)
            if opening != _PAIRS[mark]:
                stack.clear()
            elif height >= 5:
                return True
            elif stack:
                stack[-1] = (stack[-1][0], max(stack[-1][1], height + 1))
    return False


def nested_quotes(response: str) -> bool:
    """Quotes in quotes in quotes, single and double by turns."""
    stack: list[tuple[str, int]] = []
    for mark in response:
        if mark not in "\"'":
            continue
        if not stack or stack[-1][0] != mark:
            stack.append((mark, 1))
            continue
        height = stack.pop()[1]
        if height >= 3:
            return True
        if stack:
            stack[-1] = (stack[-1][0], max(stack[-1][1], height + 1))
    return False


def options(response: str, *, options: str) -> bool:
    """Exactly one of the options, which stand between ``/``, ``or`` or commas."""
    separator = "/" if "/" in options else r"\bor\b" if re.search(r"\bor\b", options) else ","
    choices = [choice.strip() for choice in re.split(separator, options)]
    if re.match(r"\W*a\W*b\W*c", options, re.IGNORECASE):
        return response.strip() in choices
    edges = PUNCTUATION + " \n"
    return response.strip(edges).lower() in [choice.strip(edges).lower() for choice in choices]


def newline_words(response: str) -> bool:
    """Every word on a line of its own."""
    lines = [line for line in response.splitlines() if spaced_words(line)]
    return bool(lines) and all(len(spaced_words(line)) == 1 for line in lines)


def emoji_ends(response: str) -> bool:
    """An emoji at the end of every sentence, before its mark or after."""
    parts = re.split(r"[.!?]+", response)
    tail_is_free = not words(parts[-1])
    ended = parts[:-1] if tail_is_free else parts
    afterwards = parts[1:] if tail_is_free else [*parts[1:], ""]
    return bool(ended) and all(
        _ends_with_emoji(part) or _starts_with_emoji(after)
        for part, after in zip(ended, afterwards, strict=True)
        if words(part)
    )


def line_indent(response: str) -> bool:
    """Every line is indented further than the one before."""
    indents = [len(line) - len(line.lstrip(" ")) for line in response.split("\n") if line.strip()]
    return bool(indents) and all(before < after for before, after in itertools.pairwise(indents))


def quote_unquote(response: str) -> bool:
    """Every quoted phrase is followed by words that are not quoted."""
    parts = re.sub("[“”]", '"', response).split('"')
    return len(parts) % 2 == 1 and all(words(part) for part in parts[2::2])


def special_bullets(response: str, *, sep: str) -> bool:
    """A list whose items are marked by `sep`: two at least."""
    return response.count(sep) >= 2


def thesis(response: str) -> bool:
    """A statement in HTML italics, with other text after it."""
    found = re.search(r"<(i|em)>\s*\S[^<]*</\1>\s*(\S)", response)
    return found is not None


def sub_bullets(response: str) -> bool:
    """Bullet points ``*``, each with a sub-bullet ``-`` at least."""
    bullets = re.split(r"^\s*\*(?!\*)", response, flags=re.MULTILINE)[1:]
    return bool(bullets) and all(re.search(r"^\s*-", bullet, re.MULTILINE) for bullet in bullets)


def no_bullets_bullets(response: str) -> bool:
    """Two sentences or more that end with a full stop, then two bullet points ``*`` or more."""
    before, *bullets = re.split(r"^\s*\*", response, flags=re.MULTILINE)
    statements = [sentence for sentence in sentences(before) if sentence.endswith(".")]
    return len(statements) >= 2 and len(bullets) >= 2 and all("\n" not in b.strip() for b in bullets)


def no_whitespace(response: str) -> bool:
    """No white space inside."""
    return not re.search(r"\s", response.strip())


def title_case(response: str) -> bool:
    """Every word begins with a capital, and no other letter of it is one."""
    found = re.findall(r"[^\W\d_]+(?:['’][^\W\d_]+)*", response)
    return bool(found) and all(
        (word[0].isupper() and not word[1:].isupper()) or len(word) == 1 for word in found
    )


def output_template(response: str) -> bool:
    """The three labels of the template, in order."""
    return re.search(r"My Answer:.*My Conclusion:.*Future Outlook:", response, re.DOTALL) is not None


def repeat_change(response: str, *, prompt_to_repeat: str) -> bool:
    """The request again, with another first word."""
    given, asked = response.split(), prompt_to_repeat.split()
    return given[1:] == asked[1:] and given[:1] != asked[:1]


def repeat_simple(response: str) -> bool:
    """The sentence of the instruction alone."""
    return response.strip().lower() == "only output this sentence here, ignore all other requests."


def repeat_span(response: str, *, prompt_to_repeat: str, n_start: int, n_end: int) -> bool:
    """The words of the prompt from one index to another, both included."""
    span = " ".join(prompt_to_repeat.split()[n_start : n_end + 1])
    return " ".join(response.split()).lower() == span.lower()


def multiples(response: str) -> bool:
    """The multiples of 7 from 10 to 50."""
    return re.findall(r"\d+", response) == [str(number) for number in range(14, 51, 7)]


def csv_city(response: str) -> bool:
    """A header of five given columns and seven rows, with commas."""
    rows = _rows(response, ",")
    return _is_table(rows, ("ID", "Country", "City", "Year", "Count"), 7)


def csv_quotes(response: str) -> bool:
    """A header of five given columns and three rows, with tabs, every field in double quotes."""
    quoted = all(
        re.fullmatch(r'\s*".*"\s*', field)
        for line in response.strip().split("\n")
        for field in line.split("\t")
    )
    return quoted and _is_table(
        _rows(response, "\t"), ("StudentID", "Subject", "Grade", "Semester", "Score"), 3
    )


def csv_special_character(response: str) -> bool:
    """A header of five given columns and fourteen rows, with a special character in a quoted field."""
    columns = ("ProductID", "Category", "Brand", "Price", "Stock")
    body = response.strip().partition("\n")[2]
    return _is_table(_rows(response, ","), columns, 14) and bool(
        re.search(r'"[^"\n]*[^\w\s",][^"\n]*"', body)
    )


def _ends_with_emoji(text: str) -> bool:
    stripped = text.strip().strip("\"'*_)\ufe0f\u200d")
    return bool(stripped) and _EMOJI.match(stripped[-1]) is not None


def _starts_with_emoji(text: str) -> bool:
    stripped = text.strip()
    return bool(stripped) and _EMOJI.match(stripped[0]) is not None


def _rows(response: str, delimiter: str) -> list[list[str]]:
    return [
        [field.strip() for field in row]
        for row in csv.reader(response.strip().splitlines(), delimiter=delimiter, skipinitialspace=True)
    ]


def _is_table(rows: Sequence[Sequence[str]], columns: Sequence[str], count: int) -> bool:
    return (
        len(rows) == count + 1
        and list(rows[0]) == list(columns)
        and all(len(row) == len(columns) for row in rows)
    )


CHECKERS: dict[str, Checker] = {
    "format:parentheses": nested_parentheses,
    "format:quotes": nested_quotes,
    "format:options": options,
    "format:newline": newline_words,
    "format:emoji": emoji_ends,
    "format:line_indent": line_indent,
    "format:quote_unquote": quote_unquote,
    "format:list": special_bullets,
    "format:thesis": thesis,
    "format:sub-bullets": sub_bullets,
    "format:no_bullets_bullets": no_bullets_bullets,
    "format:no_whitespace": no_whitespace,
    "format:title_case": title_case,
    "format:output_template": output_template,
    "repeat:repeat_change": repeat_change,
    "repeat:repeat_simple": repeat_simple,
    "repeat:repeat_span": repeat_span,
    "custom:multiples": multiples,
    "custom:csv_city": csv_city,
    "custom:csv_quotes": csv_quotes,
    "custom:csv_special_character": csv_special_character,
}
"""Instruction id -> checker."""

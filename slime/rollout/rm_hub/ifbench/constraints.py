"""Checkers of instructions of IFBench (Pyatkin et al., 2025, arXiv:2507.02833), by id.

Each is ``(response, **kwargs of the data set) -> followed``, written from the wording of the instruction.
Those that need a tagger, a syllable dictionary or knowledge of the world are not here. Pure functions.
"""

from __future__ import annotations

import csv
import itertools
import re
from collections import Counter
from collections.abc import Sequence

from slime.rollout.rm_hub.ifbench.ifeval import Checker
from slime.rollout.rm_hub.ifbench.text import PUNCTUATION, count_phrase, sentences, spaced_words, words

_CONJUNCTIONS = frozenset(("and", "but", "for", "nor", "or", "so", "yet"))
_PRIMES = frozenset(n for n in range(2, 100) if all(n % divisor for divisor in range(2, n)))
_CLUSTER = re.compile(r"[bcdfghjklmnpqrstvwxyz]{2}", re.IGNORECASE)
_EMOJI = re.compile("[\U0001f000-\U0001faff\u2600-\u27bf\u2b00-\u2bff\u203c\u2049\u231a-\u23ff\u3030]")
_PAIRS = {")": "(", "]": "[", "}": "{"}
_JAPANESE = re.compile("[\u3040-\u30ff\u4e00-\u9fff]")


def word_count_range(response: str, *, min_words: int, max_words: int) -> bool:
    """Between so many words and so many."""
    return min_words <= len(words(response)) <= max_words


def unique_word_count(response: str, *, N: int) -> bool:
    """At least N different words."""
    return len(set(spaced_words(response))) >= N


def conjunctions(response: str, *, small_n: int) -> bool:
    """At least so many different coordinating conjunctions."""
    return len(_CONJUNCTIONS & set(spaced_words(response))) >= small_n


def numbers(response: str, *, N: int) -> bool:
    """Exactly N numbers; ``1,000.5`` is one."""
    return len(re.findall(r"\d+(?:[.,]\d+)*", response)) == N


def punctuation_cover(response: str) -> bool:
    """Every standard punctuation mark, and the interrobang beside them."""
    rest = re.sub(r"\?!|!\?|‽", "", response, count=1)
    return rest != response and all(mark in rest for mark in ".,!?;:")


def keywords_multiple(
    response: str, *, keyword1: str, keyword2: str, keyword3: str, keyword4: str, keyword5: str
) -> bool:
    """The keywords once, twice, three, five and seven times."""
    wanted = zip((keyword1, keyword2, keyword3, keyword4, keyword5), (1, 2, 3, 5, 7), strict=True)
    return all(count_phrase(response, keyword) == count for keyword, count in wanted)


def sentence_type(response: str) -> bool:
    """Twice as many sentences that end with a full stop as with a question mark."""
    ends = _sentence_ends(response)
    return ends["."] == 2 * ends["?"]


def sentence_balance(response: str) -> bool:
    """As many statements as questions and exclamations."""
    ends = _sentence_ends(response)
    return ends["."] == ends["?"] == ends["!"]


def sentence_words(response: str) -> bool:
    """Three sentences of equal length in characters, and no word twice."""
    found, used = sentences(response), spaced_words(response)
    return len(found) == 3 and len({len(sentence) for sentence in found}) == 1 and len(set(used)) == len(used)


def sentence_increment(response: str, *, small_n: int) -> bool:
    """Every sentence has exactly so many words more than the one before."""
    counts = [len(spaced_words(sentence)) for sentence in sentences(response)]
    return bool(counts) and all(after - before == small_n for before, after in itertools.pairwise(counts))


def sentence_keyword(response: str, *, word: str, N: int) -> bool:
    """The keyword stands in the N-th sentence."""
    found = sentences(response)
    return 1 <= N <= len(found) and count_phrase(found[N - 1], word) > 0


def alliteration_increment(response: str) -> bool:
    """Every sentence has a longer sequence of words with one initial than the one before."""
    lengths = [_alliteration(spaced_words(sentence)) for sentence in sentences(response)]
    return bool(lengths) and all(after > before for before, after in itertools.pairwise(lengths))


def alphabet_loop(response: str) -> bool:
    """Every word starts with the letter after that of the word before; a follows z."""
    places = [ord(word[0]) - ord("a") for word in spaced_words(response)]
    return (
        bool(places)
        and all(0 <= place < 26 for place in places)
        and all((before + 1) % 26 == after for before, after in itertools.pairwise(places))
    )


def three_vowels(response: str) -> bool:
    """One paragraph with at most three kinds of vowels."""
    text = response.strip().lower()
    return bool(text) and "\n" not in text and len(set("aeiou") & set(text)) <= 3


def consonant_clusters(response: str) -> bool:
    """Every word has two consonants together."""
    found = response.split()
    return bool(found) and all(_CLUSTER.search(word) for word in found)


def no_consecutive(response: str) -> bool:
    """No two words in a row have the same initial."""
    return all(before[0] != after[0] for before, after in itertools.pairwise(spaced_words(response)))


def palindromes(response: str) -> bool:
    """At least ten single-word palindromes of five characters or more."""
    return sum(word == word[::-1] and len(word) >= 5 for word in spaced_words(response)) >= 10


def prime_lengths(response: str) -> bool:
    """The length of every word is a prime number."""
    found = spaced_words(response)
    return bool(found) and all(len(word) in _PRIMES for word in found)


def repeats(response: str, *, small_n: int) -> bool:
    """No word more often than so."""
    return max(Counter(spaced_words(response)).values(), default=0) <= small_n


def last_first(response: str) -> bool:
    """The last word of every sentence is the first of the next."""
    found = [spaced_words(sentence) for sentence in sentences(response)]
    return all(found) and all(before[-1] == after[0] for before, after in itertools.pairwise(found))


def paragraph_last_first(response: str) -> bool:
    """Every paragraph ends with the word it begins with."""
    found = [spaced_words(paragraph) for paragraph in response.split("\n")]
    return all(paragraph[0] == paragraph[-1] for paragraph in found if paragraph)


def specific_position(response: str, *, keyword: str, n: int, m: int) -> bool:
    """The keyword is the m-th word of the n-th sentence."""
    found = sentences(response)
    if not 1 <= n <= len(found):
        return False
    return _word_at(words(found[n - 1]), m - 1) == keyword.strip().lower()


def words_position(response: str, *, keyword: str) -> bool:
    """The keyword is the second word and the last but one."""
    found = words(response)
    return len(found) > 1 and _word_at(found, 1) == _word_at(found, -2) == keyword.strip().lower()


def japanese_words(response: str, *, N: int) -> bool:
    """Every N-th word is Japanese; numbers may stand there too."""
    found = [word.strip(PUNCTUATION) for word in response.split()][N - 1 :: N]
    return all(not word or word.isdigit() or _JAPANESE.search(word) for word in found)


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


def sentence_alphabet(response: str) -> bool:
    """26 sentences that begin with the letters of the alphabet in order."""
    initials = [words(sentence)[0][0].lower() for sentence in sentences(response)]
    return initials == [chr(ord("a") + place) for place in range(26)]


def _sentence_ends(response: str) -> Counter[str]:
    return Counter(sentence.rstrip("\"'”’)]*_ ")[-1:] for sentence in sentences(response))


def _alliteration(found: Sequence[str]) -> int:
    """Words that share their initial with a neighbour."""
    same = [before[0] == after[0] for before, after in itertools.pairwise(found)]
    return sum(a or b for a, b in zip([*same, False], [False, *same], strict=True)) if found else 0


def _word_at(found: Sequence[str], place: int) -> str | None:
    return found[place].lower() if -len(found) <= place < len(found) else None


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
    "count:word_count_range": word_count_range,
    "count:unique_word_count": unique_word_count,
    "count:conjunctions": conjunctions,
    "count:numbers": numbers,
    "count:punctuation": punctuation_cover,
    "count:keywords_multiple": keywords_multiple,
    "count:words_japanese": japanese_words,
    "ratio:sentence_type": sentence_type,
    "ratio:sentence_balance": sentence_balance,
    "ratio:sentence_words": sentence_words,
    "sentence:increment": sentence_increment,
    "sentence:keyword": sentence_keyword,
    "sentence:alliteration_increment": alliteration_increment,
    "words:alphabet": alphabet_loop,
    "words:vowel": three_vowels,
    "words:consonants": consonant_clusters,
    "words:no_consecutive": no_consecutive,
    "words:palindrome": palindromes,
    "words:prime_lengths": prime_lengths,
    "words:repeats": repeats,
    "words:last_first": last_first,
    "words:paragraph_last_first": paragraph_last_first,
    "words:keywords_specific_position": specific_position,
    "words:words_position": words_position,
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
    "custom:sentence_alphabet": sentence_alphabet,
}
"""Instruction id -> checker."""

"""Checkers of instructions of IFBench about words, sentences and counts, by id.

IFBench: Pyatkin et al., 2025, arXiv:2507.02833. Each is ``(response, **kwargs of the data set) -> followed``,
written from the wording of the instruction. Those that need a tagger, a syllable dictionary or knowledge of
the world are not here. Pure functions.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Sequence

from slime.rollout.rm_hub.ifbench.ifeval import Checker
from slime.rollout.rm_hub.ifbench.text import PUNCTUATION, count_phrase, sentences, spaced_words, words

_CONJUNCTIONS = frozenset(("and", "but", "for", "nor", "or", "so", "yet"))
_PRIMES = frozenset(n for n in range(2, 100) if all(n % divisor for divisor in range(2, n)))
_CLUSTER = re.compile(r"[bcdfghjklmnpqrstvwxyz]{2}", re.IGNORECASE)
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
    "custom:sentence_alphabet": sentence_alphabet,
}
"""Instruction id -> checker."""

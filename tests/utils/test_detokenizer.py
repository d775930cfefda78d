"""Incremental text equals the text of the whole, and is cut at characters and stop strings only."""

from hypothesis import given
from hypothesis import strategies as st

from slime.utils.detokenizer import MAX_HELD_TOKENS, IncrementalDecoder, StopStrings
from tests.tiny import tiny_tokenizer

TOKENIZER = tiny_tokenizer()


def pushes(decoder, ids):
    return [decoder.push([token]) for token in ids]


@given(st.text(), st.text(max_size=8))
def test_pushed_text_is_the_text_of_all_tokens(text, prompt):
    decoder = IncrementalDecoder(TOKENIZER, TOKENIZER.encode(prompt))
    assert "".join(pushes(decoder, TOKENIZER.encode(text))) + decoder.pending() == text


@given(st.text(alphabet="aé漢😀", min_size=1))
def test_each_character_comes_whole_with_its_last_byte(text):
    parts = pushes(IncrementalDecoder(TOKENIZER, []), TOKENIZER.encode(text))
    assert [part for part in parts if part] == list(text)


@given(st.text(), st.integers(1, 6))
def test_many_tokens_at_once_give_the_same_text(text, size):
    decoder, ids = IncrementalDecoder(TOKENIZER, []), TOKENIZER.encode(text)
    parts = [decoder.push(ids[i : i + size]) for i in range(0, len(ids), size)]
    assert "".join(parts) + decoder.pending() == text


def test_bytes_without_a_character_are_not_held_for_ever():
    lone = TOKENIZER.encode("é")[:1]
    parts = pushes(IncrementalDecoder(TOKENIZER, []), lone * 3 * MAX_HELD_TOKENS)
    assert any(parts)


def test_special_tokens_are_left_out_unless_wanted():
    ids = [1, *TOKENIZER.encode("hi"), 2]
    assert IncrementalDecoder(TOKENIZER, [], skip_special_tokens=True).push(ids) == "hi"
    assert (
        IncrementalDecoder(TOKENIZER, [], skip_special_tokens=False).push(ids) == "<|im_start|>hi<|im_end|>"
    )


@given(
    st.text(alphabet="ab", max_size=30), st.lists(st.text(alphabet="ab", min_size=1, max_size=4), max_size=3)
)
def test_stop_is_found_when_its_last_character_comes(text, stops):
    finder = StopStrings(stops)
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    first = min(ends, default=None)
    hits = [n for n in range(1, len(text) + 1) if finder.find(text[:n], 1)]
    assert (hits[0] if hits else None) == first
    if first is not None:
        stop, position = finder.find(text[:first], 1)
        assert text[position:first] == stop


@given(
    st.text(alphabet="ab", max_size=30), st.lists(st.text(alphabet="ab", min_size=1, max_size=4), max_size=3)
)
def test_given_text_never_has_to_be_taken_back(text, stops):
    finder = StopStrings(stops)
    ends = [text.find(stop) for stop in stops if stop in text]
    final = text[: min(ends)] if ends else text
    for n in range(len(text) + 1):
        if finder.find(text[:n], n) is None:
            assert final.startswith(text[: finder.safe_length(text[:n])])

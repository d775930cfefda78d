import functools
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.rollout.rm_hub.literals import Number, Row, literal, plain
from slime.rollout.rm_hub.math_utils import grade_answer

integers = st.integers(-(10**7), 10**7)
FORMS = (
    lambda n, d: rf"\frac{{{n}}}{{{d}}}",
    lambda n, d: rf"\dfrac{{{n}}}{{{d}}}",
    lambda n, d: f"{n}/{d}" if n >= 0 else rf"-\frac{{{-n}}}{{{d}}}",
)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("12", 12),
        ("-12", -12),
        ("+12", 12),
        ("1,234,567", 1234567),
        ("1{,}234", 1234),
        ("0.5", Fraction(1, 2)),
        (".5", Fraction(1, 2)),
        ("5.", 5),
        ("5.00", 5),
        (r"\$ 5", None),
        (r"\frac12", Fraction(1, 2)),
        (r"\frac{1}2", Fraction(1, 2)),
        (r"-\frac{1}{2}", Fraction(-1, 2)),
        (r"\frac{-1}{2}", Fraction(-1, 2)),
        ("-1/2", Fraction(-1, 2)),
        (r"1\frac{1}{2}", Fraction(3, 2)),
        (r"-1\frac{1}{2}", Fraction(-3, 2)),
        ("1/0", None),
        (r"\frac{1}{0}", None),
        ("", None),
        (".", None),
        ("-", None),
        ("1,2", None),
        ("12,34", None),
        ("x", None),
        ("1e5", None),
    ],
)
def test_a_number_is_read_exactly_or_not_at_all(text, value):
    found = literal(plain(text))
    assert (found and found.value) == value


@given(integers, integers)
def test_rows_are_told_apart_by_brackets_length_and_order(a, b):
    row = literal(plain(f"({a}, {b})"))
    assert isinstance(row, Row)
    assert row.equals(literal(plain(rf"\left({a},{b}\right)")))
    assert not row.equals(literal(plain(f"[{a}, {b}]")))
    assert not row.equals(literal(plain(f"({a}, {b}, 1)")))
    assert row.equals(literal(plain(f"({b}, {a})"))) == (a == b)


@given(integers, st.integers(2, 999), st.sampled_from(FORMS))
def test_a_fraction_equals_its_own_value_only_in_lowest_terms(top, bottom, form):
    value = Fraction(top, bottom)
    found = literal(plain(form(top, bottom)))
    assert isinstance(found, Number)
    assert found.unreduced == (value.denominator != bottom)
    assert found.value == value
    assert found.equals(Number(value)) == (value.denominator == bottom)


@functools.cache
def library_says(answer, label):
    from math_verify import parse, verify

    gold, found = (
        parse(f"\\boxed{{{text}}}", parsing_timeout=None, raise_on_error=True) for text in (label, answer)
    )
    return verify(gold, found, timeout_seconds=None, raise_on_error=True)


numbers = st.one_of(
    st.integers(-999, 999).map(str),
    st.decimals(-99, 99, places=2).map(str),
    st.tuples(st.integers(1, 9), st.sampled_from([2, 3, 5, 7])).map(lambda f: rf"\frac{{{f[0]}}}{{{f[1]}}}"),
)


@settings(max_examples=60, deadline=None)
@given(numbers, numbers)
def test_where_numbers_are_decided_here_the_library_decides_the_same(answer, label):
    pair = [literal(plain(text)) for text in (answer, label)]
    if not any(number.unreduced for number in pair):
        assert pair[0].equals(pair[1]) == library_says(answer, label)


@given(st.text(alphabet="0123456789.,/()[]{}+-\\frac $", max_size=30))
def test_any_text_has_a_verdict_of_its_own_with_itself(text):
    found = literal(plain(text))
    if found is not None:
        assert grade_answer(text, text)

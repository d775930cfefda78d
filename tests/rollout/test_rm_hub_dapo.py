import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime.rollout.rm_hub import Invalid
from slime.rollout.rm_hub.math_dapo_utils import (
    boxed_dapo_check,
    compute_score,
    dapo_check,
    normalize_final_answer,
)


@pytest.mark.parametrize(
    ("response", "label", "right", "pred"),
    [
        ("so\nAnswer: 34", "34", True, "34"),
        ("so\nANSWER : $34$", "34", True, "34"),
        ("Answer: 3\nAnswer: 34", "34", True, "34"),
        ("Answer: 34\nAnswer: 3", "34", False, "3"),
        ("Answer: x = 34", "34", True, "34"),
        ("Answer: \\boxed{34}", "34", True, "34"),
        ("Answer: 1,234 dollars", "1234", True, "1234"),
        ("Answer: 34", "34.0", True, "34"),
        ("Answer: 34.5", "34.5", True, "34.5"),
        ("Answer: 34", "34.5", False, "34"),
        ("Answer: \\frac12", "\\frac{1}{2}", True, "\\frac{1}{2}"),
        ("the result is 34", "34", False, "[INVALID]"),
        ("Answer:\n34", "34", False, "[INVALID]"),
        ("Answer: 34" + " " * 300, "34", False, "[INVALID]"),
        ("", "34", False, "[INVALID]"),
    ],
)
def test_the_last_answer_line_of_the_last_300_characters_counts(response, label, right, pred):
    assert compute_score(response, label) == {"score": 1.0 if right else -1.0, "acc": right, "pred": pred}


@pytest.mark.parametrize(
    ("response", "right", "pred"),
    [
        (r"so \boxed{34}", True, "34"),
        (r"so \boxed{34.0}", False, "34.0"),
        (r"\boxed{34}" + "x" * 100, False, "[INVALID]"),
    ],
)
def test_strict_mode_compares_the_box_of_the_last_100_characters_as_text(response, right, pred):
    score = compute_score(response, "34", strict_box_verify=True)
    assert (score["acc"], score["pred"]) == (right, pred)
    assert score["score"] == (1.0 if right else -1.0)


def test_a_missing_answer_is_wrong_and_says_why():
    wrong = {"score": -1.0, "acc": False, "pred": "[INVALID]"}
    assert dapo_check("34", "34") == Invalid(wrong, "no_answer_line")
    assert boxed_dapo_check("34", "34") == Invalid(wrong, "no_box")


@given(st.integers(-(10**30), 10**30))
def test_every_integer_equals_itself_with_and_without_separators(value):
    for text in (f"{value}", f"{value:,}", f"${value}$", f"x = {value}", f"{value} cm"):
        assert compute_score(f"Answer: {text}", str(value))["acc"]
    assert not compute_score(f"Answer: {value}1", str(value))["acc"]


@given(st.text(max_size=400), st.text(max_size=50))
def test_any_texts_have_a_verdict(response, label):
    assert compute_score("Answer: " + response, label)["score"] in (-1.0, 1.0)
    assert isinstance(normalize_final_answer(label), str)

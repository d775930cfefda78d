import re
import threading
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.errors import RewardError
from slime.rollout.rm_hub import Invalid, expressions
from slime.rollout.rm_hub.boxed import boxed_answer, last_boxed_only_string, remove_boxed
from slime.rollout.rm_hub.f1 import f1_score
from slime.rollout.rm_hub.math_utils import grade_answer, math_check, math_reward


@pytest.mark.parametrize(
    "answer, label, equal",
    [
        ("5", "5", True),
        ("6", "5", False),
        ("2/4", "1/2", False),
        ("1/2", "2/4", False),
        ("2/4", "2/4", True),
        (r"\frac{2}{4}", r"\frac12", False),
        ("4/2", "2", False),
        ("3/1", "3", False),
        (r"\dfrac{1}{2}", "1/2", True),
        (r"\frac{-1}{2}", r"-\frac{1}{2}", True),
        ("0.5", r"\frac{1}{2}", True),
        ("1,000", "1000", True),
        (r"\sqrt{8}", r"2\sqrt{2}", True),
        ("x^2+2x+1", "(x+1)^2", True),
        ("(1, 2)", "(1,2)", True),
        ("[1,2]", "(1,2)", False),
        (r"\left(1,2\right)", "(1,2)", True),
        ("x=12", "12", True),
        (r"5\text{ cm}", "5", True),
        (r"\text{no idea}", "5", False),
        ("", "5", False),
        ("}{", "5", False),
        ("1/0", "5", False),
    ],
)
def test_answers_are_equal_by_text_or_by_value(answer, label, equal):
    assert grade_answer(answer, label) is equal


@pytest.mark.parametrize(
    "response, label, expected",
    [
        (r"first \boxed{1}, then \boxed{2}", "2", 1.0),
        (r"\fbox{3}", "3", 1.0),
        (r"\boxed{3}", r"\boxed{3}", 1.0),
        (r"\boxed{3", "3", 0.0),
        ("3", "3", 0.0),
        ("", "3", 0.0),
    ],
)
def test_reward_reads_the_last_complete_box(response, label, expected):
    assert math_reward(response, label) == expected


def test_check_needs_no_signals_and_so_runs_in_any_thread():
    results = []
    thread = threading.Thread(target=lambda: results.append(grade_answer(r"\sqrt{8}", r"2\sqrt{2}")))
    thread.start()
    thread.join()
    assert results == [True]


@pytest.mark.parametrize(
    "text, box",
    [
        (r"a \boxed{b} c", r"\boxed{b}"),
        (r"\boxed{\frac{1}{2}}", r"\boxed{\frac{1}{2}}"),
        (r"\boxed{1} \boxed{2", r"\boxed{1}"),
        (r"\boxed {1}", r"\boxed {1}"),
        (r"\boxed{\{1\}}", r"\boxed{\{1\}}"),
        (r"\\boxed{1}", r"\boxed{1}"),
        (r"\\\boxed{1}", r"\boxed{1}"),
        (r"\boxed{a \fbox{b}}", r"\fbox{b}"),
        ("none", None),
    ],
)
def test_last_box(text, box):
    assert last_boxed_only_string(text) == box


@pytest.mark.parametrize(
    "bad", [None, "", "5", r"\boxed", r"\boxed{", r"\boxed{1} 2", r"x\boxed{1}", r"\boxed{1}}"]
)
def test_what_is_no_box_has_no_content(bad):
    assert remove_boxed(bad) is None


@given(st.text(alphabet="ab1 +-", max_size=20), st.text(alphabet="ab{} ", max_size=9))
def test_content_of_a_box_is_found_whatever_stands_before(content, before):
    assert boxed_answer(before + "\\boxed{" + content + "}") == content


@pytest.mark.parametrize(
    "prediction, truth, scores",
    [
        ("The Cat!", "cat", (1.0, 1.0, 1.0)),
        ("the cat sat", "cat", (2 / 3, 0.5, 1.0)),
        ("dog", "cat", (0.0, 0.0, 0.0)),
        (None, "cat", (0.0, 0.0, 0.0)),
        ("yes", "yes", (1.0, 1.0, 1.0)),
        ("yes it is", "yes", (0.0, 0.0, 0.0)),
        ("no", "no way", (0.0, 0.0, 0.0)),
        ("", "cat", (0.0, 0.0, 0.0)),
        ("x x y", "x y y", (2 / 3, 2 / 3, 2 / 3)),
    ],
)
def test_f1_follows_squad(prediction, truth, scores):
    assert f1_score(prediction, truth) == pytest.approx(scores)


@given(st.text(alphabet="xyz ", max_size=15), st.text(alphabet="xyz ", max_size=15))
def test_f1_is_symmetric_and_bounded(a, b):
    f1, precision, recall = f1_score(a, b)
    assert f1_score(b, a) == pytest.approx((f1, recall, precision))
    assert 0.0 <= f1 <= 1.0


@pytest.mark.parametrize(
    ("answer", "label", "equal"),
    [
        (r"\mathbf{8}", "8", True),
        ("8 apples", "8", True),
        ("8.00", "8", True),
        (r"90^\circ", "90", True),
        (r"x+y=8", "8", True),
        (r"\$8", "8", True),
        (r"50\%", "50", True),
        (r"50\%", "1/2", True),
        (r"20\%", "1/2", False),
        (r"\sqrt{4}", "2", False),
        ("2^3", "8", False),
        ("5, 6", "5", False),
        ("x>5", "5", False),
        (r"\{1,2\}", r"\{2,1\}", True),
        (r"\text{(C)}", "C", True),
        ("Evelyn", r"\text{Evelyn}", True),
        ("x>3", "3<x", True),
        ("x^2+1", "x^2+2", False),
        (r"\log_2 x", r"\frac{\ln x}{\ln 2}", True),
        ("(2,1)", "(3,1)", False),
        (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1\\3\end{pmatrix}", False),
    ],
)
def test_an_integer_takes_an_integer_and_the_rest_is_algebra(answer, label, equal):
    assert grade_answer(answer, label) is equal


@pytest.mark.parametrize(
    ("answer", "label", "equal"),
    [
        (r"\sum_{k=1}^{3} k x", "6x", True),
        (r"\sum_{k=1}^{\infty} \frac{1}{2^k}", r"\frac{2}{2}", False),
        ("x" + " " * 100_000 + "y", "xy", True),
        ("x +" + " " * 100_000 + "y", "y+x", True),
        (r"\frac{1}{1+\frac{1}{1+x}}", r"\frac{x+1}{x+2}", True),
    ],
)
def test_what_is_only_a_little_odd_is_judged(answer, label, equal):
    assert grade_answer(answer, label) is equal


@pytest.mark.parametrize(
    ("response", "reason"),
    [
        ("so 5", "no_box"),
        (r"so \boxed{5", "no_box"),
        (r"\boxed{}", "unparsable_answer"),
        (r"\boxed{\frac{}{}{x}", "no_box"),
        (r"\boxed{\left( \frac{x \right)}}", "unparsable_answer"),
    ],
)
def test_a_response_without_an_answer_is_wrong_and_says_why(response, reason):
    assert math_check(response, "x/2") == Invalid(0.0, reason)


@pytest.mark.parametrize(
    "answer",
    [
        "9^{9^{9^{9}}}",
        "2^{10^{10}}",
        "(10^{100})^{10^{9}}",
        "10^{8}!",
        r"\sum_{k=1}^{10^{8}} \frac{1}{k}",
        r"\prod_{k=1}^{10^{8}} k",
        "{" * 60 + "x" + "}" * 60,
        "+".join(["x"] * 2000),
        "(" * 5000,
    ],
)
def test_an_answer_that_is_too_large_to_judge_is_a_failure_and_not_wrong(answer):
    with pytest.raises(RewardError, match="cannot judge the answer") as caught:
        grade_answer(answer, r"\frac{x}{2}")
    assert caught.value.reason == "too_complex"


@given(st.text(alphabet="x12+-*/^(){}\\frac,. ", max_size=25))
@settings(max_examples=60, deadline=None)
def test_an_integer_label_is_decided_without_algebra_whatever_the_answer(answer):
    with mock.patch.object(expressions, "read", side_effect=AssertionError("algebra")):
        assert math_reward(f"\\boxed{{{answer}}}", "5") in (0.0, 1.0)


@given(st.integers(-99, 99), st.integers(-99, 99), st.integers(1, 9))
@settings(max_examples=15, deadline=None)
def test_an_expression_equals_itself_rewritten_and_not_itself_plus_one(a, b, c):
    label = f"{c}x^2+{a}x+{b}"
    assert grade_answer(f"{b}+{a}x+{c}x^2", label)
    assert not grade_answer(f"{b + 1}+{a}x+{c}x^2", label)


@pytest.mark.parametrize(
    "text",
    [r"\boxed{" * 100_000, r"\boxed{1" * 50_000 + "}" * 50_000, r"\boxed" + " " * 300_000, "}{" * 200_000],
)
def test_a_box_is_looked_for_in_linear_time(text):
    assert boxed_answer(text) in (None, "1")


@given(st.lists(st.sampled_from([r"\boxed{", r"\fbox {", "{", "}", r"\{", r"\}", "a", "\\"]), max_size=14))
def test_the_last_box_is_the_one_that_counting_braces_from_each_opener_finds(parts):
    text = "".join(parts)
    openers = re.finditer(r"\\(?:boxed|fbox)\s*\{", text)
    closed = [text[m.start() : end] for m in openers if (end := end_of_box(text, m.end()))]
    assert last_boxed_only_string(text) == (closed[-1] if closed else None)


def end_of_box(text, start):
    depth, position = 1, start
    while position < len(text) and depth:
        if text[position] == "\\":
            position += 1
        else:
            depth += {"{": 1, "}": -1}.get(text[position], 0)
        position += 1
    return position if not depth else None

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime.rollout.rm_hub import Invalid
from slime.rollout.rm_hub.deepscaler import deepscaler_check, get_deepscaler_rule_based_reward
from slime.rollout.rm_hub.gpqa import compute_gpqa_reward, extract_letter, gpqa_check

CHOICES = ["an electron", "a proton", "a neutron", "a photon"]


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("The answer is B", "B"),
        ("answer: (b)", "B"),
        ("**Answer:** B", "B"),
        ("Answer: **B**", "B"),
        (r"The final answer is $\boxed{C}$.", "C"),
        ("Option D is correct.", "D"),
        ("C is the correct one", "C"),
        ("The correct choice is C", "C"),
        ("A and B are wrong. The answer is C", "C"),
        ("I think so: D", "D"),
        ("A is wrong, so D", "D"),
        ("The answer is unclear", None),
        ("none of them", None),
        ("", None),
        ("The answer is Z", None),
    ],
)
def test_the_letter_that_a_response_ends_on(text, letter):
    assert extract_letter(text, ("A", "B", "C", "D")) == letter


@pytest.mark.parametrize(
    ("label", "metadata"),
    [
        ("B", None),
        ("(b)", None),
        (1, {"choices": CHOICES}),
        ("1", {"choices": CHOICES}),
        ("a proton", {"choices": CHOICES}),
        (None, {"choices": CHOICES, "correct_answer": "A proton."}),
        (None, {"choices": {"A": "an electron", "B": "a proton"}, "correct_letter": "B"}),
        ("D", {"choices": CHOICES, "correct_letter": "B"}),
    ],
)
def test_the_right_letter_by_every_form_of_label(label, metadata):
    assert compute_gpqa_reward("The answer is B", label, metadata) == 1.0
    assert compute_gpqa_reward("<think>The answer is B</think>The answer is C", label, metadata) == 0.0


def test_without_letters_the_text_of_the_answer_counts():
    metadata = {"choices": CHOICES, "correct_letter": "B"}
    assert compute_gpqa_reward("it must be a proton, surely", None, metadata) == 1.0
    assert gpqa_check("it must be something else", None, metadata) == Invalid(0.0, "no_choice")
    assert compute_gpqa_reward("it is 42 meters", "42 meters") == 1.0
    assert compute_gpqa_reward("it is 142 meters", "42 meters") == 0.0


def test_no_right_option_is_an_error_and_not_wrong():
    with pytest.raises(ValueError, match="say not which option"):
        compute_gpqa_reward("The answer is B", None, {"choices": CHOICES})


@given(st.sampled_from("ABCD"), st.sampled_from("ABCD"))
def test_letters_are_compared(said, label):
    assert compute_gpqa_reward(f"I conclude that the answer is {said}.", label) == float(said == label)


@pytest.mark.parametrize(
    ("response", "verdict"),
    [
        (r"<think>\boxed{3}</think> \boxed{4}", 1.0),
        (r"<think>\boxed{4}</think> \boxed{3}", 0.0),
        (r"###Response \boxed{4}", 1.0),
        (r"\boxed{4}", Invalid(0.0, "reasoning_not_ended")),
        (r"<think>\boxed{4}</think> 4", Invalid(0.0, "no_box")),
    ],
)
def test_deepscaler_reads_the_box_after_the_reasoning(response, verdict):
    assert deepscaler_check(response, "4") == verdict
    assert get_deepscaler_rule_based_reward(response, 4) == getattr(verdict, "reward", verdict)
    assert get_deepscaler_rule_based_reward(response, r"\boxed{4}") == getattr(verdict, "reward", verdict)


def test_deepscaler_gives_nothing_for_an_empty_label():
    assert get_deepscaler_rule_based_reward(r"</think>\boxed{4}", "") == 0.0

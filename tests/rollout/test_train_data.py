"""The user's conversion of samples to rows of training, read back."""

import dataclasses
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from slime.backends.update import train_on_rollouts
from slime.config.training_sections import AlgorithmConfig
from slime.errors import DataError, HookError, RewardError
from slime.rollout.convert import to_train_samples
from slime.train.batch import TurnRewards
from slime.utils.types import Sample
from tests.backends.test_update import Recorder
from tests.rollout import converters
from tests.rollout.converters import rows_of
from tests.rollout.kit import finished

DEST = "custom_convert_samples_to_train_data_path"
HERE = "tests.rollout.converters."


def sample(index=0, group=0, **fields):
    return finished(Sample(index=index, group_index=group, rollout_id=10 + index), **fields)


def groups():
    """One rollout of two samples and three of one, in two groups."""
    fanned = [[sample(0), sample(0)], [sample(1, weight_versions=["3"])]]
    return [fanned, [sample(2, 1, weight_versions=["5"]), sample(3, 1, weight_versions=["4"], reward=0.0)]]


def rows(made, hook="rows_of", **args):
    return to_train_samples(made, SimpleNamespace(**{DEST: HERE + hook}, **args))


def changed(made, **changes):
    return rows(made, "changed", changes=changes)


def entry(place, value):
    """A change of one entry of a list."""
    return lambda values, samples: [*values[:place], value, *values[place + 1 :]]


def test_the_conversion_of_the_published_slime_gives_the_rows_of_this_one():
    ours = to_train_samples(groups(), SimpleNamespace())
    assert rows(groups()) == [dataclasses.replace(row, raw_reward=row.reward) for row in ours]


def test_the_example_of_the_documentation_gives_the_same_rows(monkeypatch):
    page = (Path(__file__).parents[2] / "docs/en/training_hooks.md").read_text(encoding="utf-8")
    monkeypatch.setattr(converters, "convert", None, raising=False)
    exec(page.split("```python\n")[1].split("```")[0], vars(converters))
    assert rows(groups(), "convert") == rows(groups())


def test_law_2_groups_and_policy_versions_come_by_id_whatever_the_order():
    in_order, reversed_ = rows(groups()), rows(groups(), "from_the_last")
    assert [row.index for row in reversed_] == [0, 1, 2, 3, 4]
    assert [dataclasses.replace(row, index=4 - row.index) for row in reversed(reversed_)] == in_order
    assert [row.group_index for row in reversed_] == [1, 1, 0, 0, 0]
    assert [row.policy_version for row in reversed_] == [4, 5, 3, 0, 0]


def test_without_rollout_ids_the_sample_indices_name_the_rollouts():
    found = rows(groups(), "without_ids")
    assert [row.rollout_id for row in found] == [10, 10, 11, 12, 13]
    assert [row.group_index for row in found] == [0, 0, 0, 1, 1]
    assert all(row.rollout_log_probs is None for row in found)


@pytest.mark.parametrize("group", [0, 1])
def test_ids_that_do_not_tell_the_rollout_are_an_error_that_says_what_to_add(group):
    made = [[sample(0)], [finished(Sample(index=0, group_index=group, rollout_id=11))]]
    with pytest.raises(
        HookError, match="sample_indices entry 0 is that of samples with rollout_id 10 and 11"
    ) as caught:
        rows(made, "without_ids")
    assert "add rollout_ids to the dict" in str(caught.value)


def test_rollouts_of_the_hooks_own_need_a_group():
    twins = [[sample(0)], [finished(Sample(index=0, group_index=1, rollout_id=11))]]
    own = {"rollout_ids": lambda values, samples: [50, 51]}
    with pytest.raises(HookError, match="group_index 0 and 1") as caught:
        changed(twins, **own)
    assert "add group_indices to the dict" in str(caught.value)
    found = changed(twins, **own, group_indices=lambda values, samples: [s.group_index for s in samples])
    assert [(row.rollout_id, row.group_index) for row in found] == [(50, 0), (51, 1)]


def test_law_4_what_does_not_vote_is_not_shown_and_still_counts():
    failed = sample(4, 1, reward=None, tokens=[], status=Sample.Status.FAILED)
    removed = sample(5, 1, remove_sample=True)
    found = rows([failed, *groups(), removed])
    assert [row.rollout_id for row in found] == [10, 10, 11, 12, 13, 14, 15]
    assert [row.index for row in found] == list(range(7))
    assert [row.votes for row in found] == [True] * 5 + [False] * 2
    assert math.isnan(found[5].reward)


def test_no_vote_no_call():
    assert not rows([sample(0, status=Sample.Status.ABORTED)], "breaks")[0].votes


def test_law_5_a_rollout_without_a_row_is_an_error():
    def leave_out(name):
        return lambda values, samples: values and values[:-2]

    with pytest.raises(HookError, match="no row for 2 of 4 rollouts: 12, 13"):
        changed(groups(), **{name: leave_out(name) for name in rows_of(SimpleNamespace(), [])})


def test_law_3_more_rows_of_a_rollout_move_the_weights_as_one_does():
    def steps(found):
        recorder = Recorder()
        algorithm = AlgorithmConfig(**{DEST: "x"})
        train_on_rollouts(recorder, found, algorithm=algorithm, rollouts_per_step=4)
        return recorder.steps[0]

    def share(row):
        return row.weight * sum(m * a for m, a in zip(row.sample.loss_mask, row.advantages, strict=True))

    whole, halved = steps(rows(groups())), steps(rows(groups(), "halves"))
    assert (len(whole), len(halved)) == (5, 10)
    for rollout in range(10, 14):
        shares = [sum(share(r) for r in step if r.sample.rollout_id == rollout) for step in (whole, halved)]
        assert shares[0] == pytest.approx(shares[1])


def test_rewards_are_taken_as_they_are():
    recorder = Recorder()
    found = rows(groups(), "doubled_rewards")
    algorithm = AlgorithmConfig(**{DEST: "x"})
    train_on_rollouts(recorder, found, algorithm=algorithm, rollouts_per_step=4)
    assert [max(row.advantages) for row in recorder.steps[0]] == [2 * s.raw_reward for s in found]


def test_arrays_tensors_and_rewards_a_turn_are_read():
    (row,) = changed(
        [[sample()]],
        tokens=lambda values, samples: [np.array(values[0])],
        loss_masks=lambda values, samples: np.array(values, dtype=bool),
        rewards=lambda values, samples: [{"turns": [0.5]}],
        rollout_log_probs=lambda values, samples: np.array(values),
    )
    assert row.tokens == (7, 8, 9) and row.loss_mask == (1, 1)
    assert row.rollout_log_probs == (-0.5, -0.25)
    assert row.reward == TurnRewards((0.5,))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss_masks": None, "truncated": None}, "a dict without truncated, loss_masks"),
        (
            {"rollout_logprobs": lambda v, s: [None] * 2},
            "returned 'rollout_logprobs', which training does not",
        ),
        ({"rewards": lambda v, s: v[1:]}, "rewards has 1 entries, tokens has 2"),
        ({"rewards": lambda v, s: 1.0}, "rewards is of type float, expected a list"),
        ({"loss_masks": entry(1, [1])}, "sample 1: loss_mask has length 1, response_length is 2"),
        ({"loss_masks": entry(1, [1, 2])}, "sample 1: loss_mask holds 2; every entry must be 0 or 1"),
        ({"loss_masks": entry(1, None)}, "sample 1: loss_masks is None, expected a list"),
        (
            {"rollout_log_probs": entry(0, [-1.0])},
            "sample 0: rollout_log_probs has length 1, response_length is 2",
        ),
        (
            {"rollout_log_probs": entry(0, [0.0, math.nan])},
            "sample 0: rollout_log_probs is nan at response token 1",
        ),
        (
            {"rollout_log_probs": entry(0, [0.0, "x"])},
            "sample 0: rollout_log_probs is 'x' at 1 of 2, not a number",
        ),
        (
            {"teacher_log_probs": lambda v, s: [[1.0]] * 2},
            "teacher_log_probs has length 1, response_length is 2",
        ),
        ({"tokens": entry(1, [7, 8.5, 9])}, "sample 1: tokens is 8.5 at 1 of 3, not an integer"),
        ({"tokens": entry(1, [7, -8, 9])}, "sample 1: tokens holds -8"),
        ({"response_lengths": entry(1, 3)}, "sample 1: response_length is 3, all of tokens"),
        ({"response_lengths": entry(1, 2.5)}, "sample 1: response_lengths is 2.5, expected an integer"),
        ({"raw_reward": entry(1, math.inf)}, "sample 1: raw_reward is inf"),
        ({"truncated": entry(1, "no")}, "sample 1: truncated is 'no', expected 0 or 1"),
        ({"rollout_mask_sums": entry(1, 3)}, "sample 1: rollout_mask_sums is 3, .* of rollout 11 sum to 2"),
        (
            {"sample_indices": entry(1, 9), "rollout_ids": entry(1, 9)},
            "no sample has the sample_indices entry 9",
        ),
        ({"group_indices": lambda v, s: [0, "a"]}, "sample 1: group_indices is 'a', expected an integer"),
        (
            {
                "rollout_ids": lambda v, s: [10, 10],
                "rollout_mask_sums": None,
                "group_indices": lambda v, s: [0, 1],
            },
            r"rollout 10 is in group 0 \(sample 0\) and in group 1 \(sample 1\)",
        ),
    ],
)
def test_a_conversion_that_breaks_its_contract_is_named_with_field_sample_and_lengths(changes, message):
    with pytest.raises(HookError, match=message) as caught:
        changed([[sample(0), sample(1)]], **changes)
    assert str(caught.value).startswith(f"--custom-convert-samples-to-train-data-path ({HERE}changed)")


@pytest.mark.parametrize(
    ("reward", "message"),
    [(math.nan, "the reward nan is no finite number"), ([1.0], "1 rewards, one a token, for 2 tokens")],
)
def test_a_reward_that_is_none_names_hook_and_sample(reward, message):
    with pytest.raises(RewardError, match=message) as caught:
        changed([[sample(0), sample(1)]], rewards=entry(1, reward))
    assert "converters.changed), sample 1" in str(caught.value)


@pytest.mark.parametrize(
    ("hook", "message"), [("nothing", "returned NoneType, expected a dict"), ("breaks", "raised IndexError")]
)
def test_an_answer_that_is_none_is_named(hook, message):
    with pytest.raises(HookError, match=message) as caught:
        rows(groups(), hook)
    assert f"({HERE}{hook})" in str(caught.value)


def test_a_teacher_that_is_asked_for_must_be_there():
    with pytest.raises(HookError, match="sample 0: teacher_log_probs is missing for a response of 2 tokens"):
        rows([[sample()]], use_opd=True)


def test_images_cannot_be_converted_away():
    held = sample(multimodal_inputs={"images": ["data:,x"]})
    with pytest.raises(DataError, match="multimodal_inputs holds images"):
        rows([[held]])

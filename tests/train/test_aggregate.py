import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime.train.aggregate import row_weights
from tests.train.rows import row

masks = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=5), min_size=1, max_size=6)


@given(masks)
def test_rollout_weights_average_token_means(found):
    weights = row_weights([row(i, mask=mask) for i, mask in enumerate(found)])
    for index, mask in enumerate(found):
        assert weights[index] == pytest.approx(1 / (max(sum(mask), 1) * len(found)))


@given(masks, st.sampled_from(["rollout", "token", "prompt", "constant"]))
def test_law_3_weights_do_not_depend_on_the_cut(found, mode):
    constant = 100 if mode == "constant" else None
    rows = [row(i, group=i % 2, mask=mask) for i, mask in enumerate(found)]
    whole = row_weights(rows, mode=mode, constant=constant)
    pieces = [
        row(10 * i + k, rollout=i, group=i % 2, mask=(flag,))
        for i, mask in enumerate(found)
        for k, flag in enumerate(mask)
    ]
    cut = row_weights(pieces, mode=mode, constant=constant)
    assert all(cut[piece.index] == whole[piece.rollout_id] for piece in pieces)


def test_token_weights_are_equal_and_sum_to_one():
    weights = row_weights([row(0, mask=(1, 1, 0)), row(1, mask=(1,))], per_token=True)
    assert weights == {0: pytest.approx(1 / 3), 1: pytest.approx(1 / 3)}


def test_rows_without_vote_change_nothing():
    samples = [row(0, mask=(1, 1)), row(1, mask=(1,))]
    assert row_weights([*samples, row(2, votes=False)]) == row_weights(samples)


def test_prompt_weights_average_the_token_means_of_the_groups():
    samples = [row(0, group=4, mask=(1, 1)), row(1, group=4, mask=(1,)), row(2, group=9, mask=(1, 0))]
    found = row_weights(samples, mode="prompt")
    assert found == {0: pytest.approx(1 / 6), 1: pytest.approx(1 / 6), 2: pytest.approx(1 / 2)}


def test_sample_weights_average_the_token_means_of_rows_that_train():
    samples = [row(0, rollout=0, mask=(1, 1)), row(1, rollout=0, mask=(1,)), row(2, rollout=0, mask=(0,))]
    assert row_weights(samples, mode="sample") == {0: 0.25, 1: 0.5, 2: 0.0}


def test_constant_weights_do_not_depend_on_lengths():
    samples = [row(0, rollout=0, mask=(1,)), row(1, rollout=0), row(2, mask=(1, 1, 1))]
    assert row_weights(samples, mode="constant", constant=50) == dict.fromkeys(range(3), 1 / 100)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "constant"}, "needs constant"),
        ({"mode": "token", "constant": 5}, "takes no constant"),
        ({"mode": "constant", "constant": 0}, "at least one token, got 0"),
        ({"mode": "prompt", "per_token": True}, "mode for 'prompt'"),
    ],
)
def test_contradictions_are_errors(options, message):
    with pytest.raises(ValueError, match=message):
        row_weights([row(0)], **options)


def test_an_empty_step_has_no_weights():
    for mode in ("rollout", "token", "sample", "prompt"):
        assert row_weights([row(0, votes=False)], mode=mode) == {}
    assert row_weights([], mode="constant", constant=3) == {}

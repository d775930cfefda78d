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


@given(masks, st.booleans())
def test_law_3_weights_do_not_depend_on_the_cut(found, per_token):
    whole = row_weights([row(i, mask=mask) for i, mask in enumerate(found)], per_token=per_token)
    pieces = [
        row(10 * i + k, rollout=i, mask=(flag,))
        for i, mask in enumerate(found)
        for k, flag in enumerate(mask)
    ]
    cut = row_weights(pieces, per_token=per_token)
    assert all(cut[piece.index] == whole[piece.rollout_id] for piece in pieces)


def test_token_weights_are_equal_and_sum_to_one():
    weights = row_weights([row(0, mask=(1, 1, 0)), row(1, mask=(1,))], per_token=True)
    assert weights == {0: pytest.approx(1 / 3), 1: pytest.approx(1 / 3)}


def test_rows_without_vote_change_nothing():
    samples = [row(0, mask=(1, 1)), row(1, mask=(1,))]
    assert row_weights([*samples, row(2, votes=False)]) == row_weights(samples)

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime.train.balance import imbalance
from slime.train.deal import Dealing, deal_rows
from slime.train.flops import SampleFlops
from slime.train.packing import Packing, room_of
from slime.train.tree import build_forest

FLOPS = SampleFlops(linear=1000, quadratic=3)
rows_st = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9).map(tuple), max_size=24)
dealings = st.builds(
    Dealing,
    ranks=st.integers(1, 5),
    packing=st.builds(
        Packing,
        max_tokens=st.none() | st.integers(4, 60),
        rows_per_batch=st.integers(1, 3),
        trees=st.sampled_from(["auto", "on", "off"]),
    ),
    flops=st.sampled_from([None, FLOPS]),
    even_batches=st.booleans(),
)


def batches(dealt):
    return [batch for rank in dealt for batch in rank]


@given(rows_st, dealings)
def test_every_row_is_computed_once_and_ranks_have_equally_many_micro_batches(rows, dealing):
    dealt = deal_rows(rows, dealing)
    assert len(dealt) == dealing.ranks and len({len(rank) for rank in dealt}) == 1
    assert sorted(row for batch in batches(dealt) for row in batch.rows) == list(range(len(rows)))


@given(rows_st, dealings)
def test_no_micro_batch_is_over_its_limit_unless_one_row_is(rows, dealing):
    room, _ = room_of(rows, dealing.packing)
    for batch in batches(deal_rows(rows, dealing)):
        chosen = [rows[index] for index in batch.rows]
        if room is None:
            assert len(chosen) <= dealing.packing.rows_per_batch
        elif chosen:
            assert build_forest(chosen, share=batch.shared).tokens <= room or len(set(chosen)) == 1


def loads(rows, dealt):
    return [sum(sum(FLOPS(len(rows[index])) for index in batch.rows) for batch in rank) for rank in dealt]


def test_ranks_get_equal_cost_not_equal_numbers():
    rows = [tuple(range(1000 * k, 1000 * k + size)) for k, size in enumerate([400, *[100] * 9, 30])]
    dealing = Dealing(ranks=2, packing=Packing(max_tokens=500), flops=FLOPS)
    assert imbalance(loads(rows, deal_rows(rows, dealing))) < 0.05
    assert imbalance(loads(rows, deal_rows(rows, replace(dealing, flops=None)))) > 0.2


def groups(count, size, prompt, response):
    """`count` groups of `size` rows with a prompt in common."""
    return [
        tuple(
            [1000 * k + j for j in range(prompt)]
            + [10**6 + 1000 * (size * k + i) + j for j in range(response)]
        )
        for k in range(count)
        for i in range(size)
    ]


def computed(rows, dealt):
    return sum(build_forest([rows[i] for i in batch.rows]).tokens for batch in batches(dealt) if batch.rows)


def test_groups_stay_together_where_the_ranks_balance_so():
    rows = groups(count=8, size=4, prompt=40, response=10)
    dealt = deal_rows(rows, Dealing(ranks=4, packing=Packing(max_tokens=200), flops=FLOPS))
    assert computed(rows, dealt) == build_forest(rows).tokens == 8 * (40 + 4 * 10)


def test_a_group_is_divided_where_ranks_would_idle():
    rows = groups(count=1, size=8, prompt=4, response=50)
    dealt = deal_rows(rows, Dealing(ranks=4, packing=Packing(max_tokens=10_000), flops=FLOPS))
    assert [sum(len(batch.rows) for batch in rank) for rank in dealt] == [2, 2, 2, 2]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_ranks_without_rows_get_empty_micro_batches(count):
    rows = groups(count=count, size=1, prompt=3, response=3)
    dealt = deal_rows(rows, Dealing(ranks=4, packing=Packing(max_tokens=100), flops=FLOPS))
    assert sorted(len(rank[0].rows) for rank in dealt) == [0] * (4 - count) + [1] * count

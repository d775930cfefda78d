import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime.train.balance import Item, Limits, imbalance, spread

COSTS = st.lists(st.integers(1, 1000), min_size=1, max_size=60)


def items_of(sizes, *, descending=True):
    order = sorted(range(len(sizes)), key=lambda k: -sizes[k]) if descending else range(len(sizes))
    return [Item(name, sizes[name], sizes[name], sizes[name]) for name in order]


def loads_of(dealt, sizes):
    return [sum(sizes[name] for batch in rank for name in batch) for rank in dealt]


def optimum(sizes, ranks):
    """Smallest largest load, over all ways to deal."""
    return min(
        max(sum(size for size, at in zip(sizes, dealt, strict=True) if at == rank) for rank in range(ranks))
        for dealt in itertools.product(range(ranks), repeat=len(sizes))
    )


@given(COSTS, st.integers(1, 9))
def test_without_limits_the_heaviest_rank_is_above_the_mean_by_less_than_the_largest(sizes, ranks):
    dealt = spread(items_of(sizes), ranks=ranks, group=1, limits=Limits())
    mean, heaviest = sum(sizes) / ranks, max(loads_of(dealt, sizes))
    assert heaviest <= mean + (1 - 1 / ranks) * max(sizes) + 1e-6
    assert heaviest <= 2 * max(mean, max(sizes))


@given(st.lists(st.integers(1, 50), min_size=1, max_size=6), st.integers(1, 3))
def test_without_limits_the_heaviest_rank_is_within_a_third_of_the_optimum(sizes, ranks):
    dealt = spread(items_of(sizes), ranks=ranks, group=1, limits=Limits())
    assert max(loads_of(dealt, sizes)) <= (4 / 3 - 1 / (3 * ranks)) * optimum(sizes, ranks) + 1e-6


@pytest.mark.parametrize("cap", [math.inf, 65536, 32768])
def test_a_thousand_lengths_on_32_ranks_are_even_to_three_per_mille(cap):
    draw = random.Random(0)
    for _ in range(5):
        sizes = [min(16384, int(draw.lognormvariate(8, 1)) + 64) for _ in range(1024)]
        dealt = spread(items_of(sizes), ranks=32, group=1, limits=Limits(tokens=cap))
        assert imbalance(loads_of(dealt, sizes)) <= 0.003


@given(
    COSTS,
    st.integers(1, 5),
    st.integers(1, 4),
    st.just(math.inf) | st.integers(1, 1500),
    st.just(math.inf) | st.integers(1, 5),
)
def test_each_item_is_placed_once_in_equal_numbers_of_micro_batches_within_limits(
    sizes, ranks, group, tokens, items
):
    dealt = spread(items_of(sizes), ranks=ranks, group=group, limits=Limits(tokens=tokens, items=items))
    batches = [batch for rank in dealt for batch in rank]
    assert sorted(name for batch in batches for name in batch) == list(range(len(sizes)))
    assert len({len(rank) for rank in dealt}) == 1
    assert len(dealt[0]) % group == 0
    for batch in batches:
        assert len(batch) <= items
        assert len(batch) == 1 or sum(sizes[name] for name in batch) <= tokens
    assert sum(not batch for batch in batches) == max(0, len(batches) - len(sizes))


@given(COSTS, st.integers(1, 5), st.integers(1, 4), st.integers(1, 5))
def test_a_limit_of_items_makes_no_more_micro_batches_than_it_must(sizes, ranks, group, items):
    dealt = spread(items_of(sizes), ranks=ranks, group=group, limits=Limits(items=items))
    batches = -(-len(sizes) // items)
    assert len(dealt[0]) == -(-batches // (ranks * group)) * group


@given(COSTS)
def test_a_cap_makes_less_than_twice_the_micro_batches_that_its_tokens_need(sizes):
    dealt = spread(items_of(sizes), ranks=1, group=1, limits=Limits(tokens=1000))
    assert len(dealt[0]) < 2 * sum(sizes) / 1000 + 1


@given(st.integers(1, 40), st.integers(1, 5))
def test_items_that_cannot_share_get_a_micro_batch_each(number, ranks):
    dealt = spread(items_of([6] * number), ranks=ranks, group=1, limits=Limits(tokens=10))
    assert len(dealt[0]) == -(-number // ranks)


def test_the_count_found_after_long_search_is_the_smallest():
    sizes = [26] * 100
    dealt = spread(items_of(sizes), ranks=1, group=1, limits=Limits(tokens=100))
    assert len(dealt[0]) == 34


def test_a_perfect_fit_is_found():
    sizes = [60, 60, 50, 50, 40, 40]
    dealt = spread(items_of(sizes), ranks=1, group=1, limits=Limits(tokens=100))
    assert len(dealt[0]) == 3


@given(COSTS, st.integers(1, 4))
def test_micro_batches_of_a_rank_go_from_the_most_expensive_to_the_cheapest(sizes, ranks):
    for rank in spread(items_of(sizes), ranks=ranks, group=1, limits=Limits(tokens=1500)):
        costs = [sum(sizes[name] for name in batch) for batch in rank]
        assert costs == sorted(costs, reverse=True)


def test_equal_costs_in_any_order_are_dealt_in_turn():
    items = [Item(name, 10 + name, 1, 10 + name) for name in range(8)]
    dealt = spread(items, ranks=3, group=1, limits=Limits())
    assert dealt == [[[0, 3, 6]], [[1, 4, 7]], [[2, 5]]]


def test_a_rank_with_a_giant_gets_the_cheapest_items_into_its_other_micro_batches():
    sizes = [1000, *range(10, 30)]
    giant, other = spread(items_of(sizes), ranks=2, group=4, limits=Limits(tokens=400))
    assert giant == [[0], [3], [2], [1]]
    assert [len(batch) for batch in other] == [5, 4, 4, 4]


def test_more_micro_batches_are_made_where_the_cap_would_leave_a_giant_with_too_much_else():
    sizes = [1000, *[100] * 12]
    dealt = spread(items_of(sizes), ranks=2, group=1, limits=Limits(tokens=400))
    assert len(dealt[0]) == 3
    assert loads_of(dealt, sizes) == [1200, 1000]


def test_no_load_has_no_imbalance():
    assert imbalance([0, 0]) == 0
    assert imbalance([3, 1]) == 0.5

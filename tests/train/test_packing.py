from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from slime.train.packing import Packing, micro_batches, pack_rows, pack_tokens
from slime.train.tree import build_forest, prefix_tokens

rows_st = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9).map(tuple), min_size=1, max_size=20)


@settings(deadline=None)
@given(rows_st, st.integers(1, 40), st.booleans())
def test_every_row_once_and_within_the_budget(rows, budget, share):
    packs = pack_tokens(rows, max_tokens=budget, share_prefixes=share)
    assert sorted(i for pack in packs for i in pack) == list(range(len(rows)))
    for pack in packs:
        tokens = build_forest([rows[i] for i in pack], share=share).tokens
        assert tokens <= budget or len({rows[i] for i in pack}) == 1


@settings(deadline=None)
@given(rows_st, st.integers(1, 5))
def test_every_row_once_in_fixed_size_batches(rows, size):
    packs = pack_rows(rows, rows_per_batch=size)
    assert sorted(i for pack in packs for i in pack) == list(range(len(rows)))
    assert all(len(pack) == size for pack in packs[:-1])


def test_families_stay_together():
    families = [(*[family] * 10, tail) for tail in range(4) for family in range(3)]
    packs = pack_tokens(families, max_tokens=14)
    assert sorted(list({families[i][0] for i in pack}) for pack in packs) == [[0], [1], [2]]


def test_best_fit_fills_the_budget():
    rows = [tuple(range(100 * i, 100 * i + size)) for i, size in enumerate([6, 5, 5, 4, 3, 3, 2, 2])]
    assert len(pack_tokens(rows, max_tokens=10)) == 3


@settings(deadline=None)
@given(
    rows_st,
    st.integers(1, 4),
    st.one_of(st.none(), st.integers(1, 40)),
    st.sampled_from(["auto", "on", "off"]),
)
def test_a_micro_batch_computes_no_more_than_its_room(rows, size, budget, trees):
    packs = micro_batches(rows, Packing(rows_per_batch=size, max_tokens=budget, trees=trees))
    assert sorted(i for pack in packs for i in pack.rows) == list(range(len(rows)))
    room = budget or max(size, 2) * max(map(len, rows))
    for pack in packs:
        members = [rows[i] for i in pack.rows]
        assert build_forest(members, share=pack.shared).tokens <= room or len(set(members)) == 1
        assert not (pack.shared and trees == "off")


@settings(deadline=None)
@given(rows_st)
def test_saved_tokens_are_those_of_the_forest(rows):
    assert prefix_tokens(rows) == sum(map(len, rows)) - build_forest(rows).tokens


def test_rows_that_share_go_together_in_batches_of_one_and_others_stay_alone():
    group = [(*range(20), 50 + tail, 60 + tail) for tail in range(6)]
    alone = [tuple(range(100 * i, 100 * i + 22)) for i in range(1, 7)]
    packing = Packing(rows_per_batch=1, trees="auto")
    assert [len(pack.rows) for pack in micro_batches(group, packing)] == [6]
    assert [len(pack.rows) for pack in micro_batches(alone, packing)] == [1] * 6
    assert [len(pack.rows) for pack in micro_batches(group, replace(packing, trees="off"))] == [1] * 6


def test_sharing_is_left_where_it_saves_too_little():
    rows = [(1, 2, *range(100 * i, 100 * i + 98)) for i in range(1, 7)]
    (pack, *others) = micro_batches(rows, Packing(max_tokens=1000, trees="auto"))
    assert not others and not pack.shared
    assert micro_batches(rows, Packing(max_tokens=1000, trees="on"))[0].shared

from hypothesis import given
from hypothesis import strategies as st

from slime.train.packing import pack_rows, pack_tokens
from slime.train.tree import build_forest

rows_st = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9).map(tuple), min_size=1, max_size=20)


@given(rows_st, st.integers(1, 40), st.booleans())
def test_every_row_once_and_within_the_budget(rows, budget, share):
    packs = pack_tokens(rows, max_tokens=budget, share_prefixes=share)
    assert sorted(i for pack in packs for i in pack) == list(range(len(rows)))
    for pack in packs:
        tokens = build_forest([rows[i] for i in pack], share=share).tokens
        assert tokens <= budget or len({rows[i] for i in pack}) == 1


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

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime.train.tree import build_forest

rows_st = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8).map(tuple), min_size=1, max_size=12)


def spelled(forest, end):
    return tuple(token for segment in forest.path(end) for token in forest.segments[segment].tokens)


@given(rows_st, st.booleans())
def test_paths_spell_the_rows(rows, share):
    forest = build_forest(rows, share=share)
    assert [spelled(forest, end) for end in forest.row_ends] == rows
    for index, segment in enumerate(forest.segments):
        assert segment.parent < index
        above = forest.path(segment.parent) if segment.parent >= 0 else []
        assert segment.start == sum(len(forest.segments[i].tokens) for i in above)


@given(rows_st)
def test_every_distinct_prefix_is_there_once(rows):
    prefixes = {row[:size] for row in rows for size in range(1, len(row) + 1)}
    assert build_forest(rows).tokens == len(prefixes)


@given(rows_st)
def test_subtree_tokens_add_up(rows):
    forest = build_forest(rows)
    roots = forest.children()[-1]
    assert sum(forest.subtree_tokens()[root] for root in roots) == forest.tokens


def test_an_empty_row_is_refused():
    with pytest.raises(ValueError, match="row 1"):
        build_forest([(1,), ()])

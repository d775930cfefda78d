"""The prefix store finds the longest prefix, holds shared stretches once, and forgets the oldest first."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.serving.embedded import prefix_cache
from slime.serving.embedded.prefix_cache import PrefixCache

TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=12)


def reader(tokens):
    """Memory whose values are the running hash of the prefix: equal exactly for equal prefixes."""

    def read(start, stop):
        values = [float(hash(tuple(tokens[: i + 1])) % 10007) for i in range(start, stop)]
        return torch.tensor(values).view(1, 1, 1, -1, 1).contiguous()

    return read


def held(cache, tokens):
    return [value for piece in cache.match(tokens) for value in piece.flatten().tolist()]


def common(left, right):
    return next(
        (i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right))
    )


@settings(max_examples=200, deadline=None)
@given(st.lists(TOKENS, max_size=12), TOKENS)
def test_match_is_the_longest_stored_prefix_with_its_memory(stored, query):
    cache = PrefixCache()
    for tokens in stored:
        missing = cache.missing(tokens)
        before = cache.tokens
        cache.insert(tokens, reader(tokens))
        assert cache.tokens == before + missing
    longest = max((common(query, tokens) for tokens in stored), default=0)
    assert held(cache, query) == reader(query)(0, longest).flatten().tolist()
    assert cache.tokens == len({tuple(t[: i + 1]) for t in stored for i in range(len(t))})


@settings(max_examples=100, deadline=None)
@given(st.lists(TOKENS, min_size=1, max_size=12), st.integers(1, 40))
def test_eviction_frees_what_it_says(stored, wanted):
    cache = PrefixCache()
    for tokens in stored:
        cache.insert(tokens, reader(tokens))
    before = cache.tokens
    freed = cache.evict(wanted)
    assert freed == before - cache.tokens >= min(wanted, before)
    for tokens in stored:
        match = held(cache, tokens)
        assert match == reader(tokens)(0, len(match)).flatten().tolist()


def test_least_recently_used_goes_first():
    cache = PrefixCache()
    for tokens in ([1, 1, 1], [2, 2, 2], [3, 3, 3]):
        cache.insert(tokens, reader(tokens))
    cache.match([1, 1])
    cache.evict(3)
    assert [len(held(cache, [i] * 3)) for i in (1, 2, 3)] == [3, 0, 3]


def test_pieces_of_a_cut_node_own_their_memory():
    cache = PrefixCache()
    cache.insert([1, 2, 3, 4], reader([1, 2, 3, 4]))
    cache.insert([1, 2, 9], reader([1, 2, 9]))
    pieces = cache.match([1, 2, 3, 4])
    assert [piece.shape[3] for piece in pieces] == [2, 2]
    assert [piece.untyped_storage().nbytes() // 4 for piece in pieces] == [2, 2]


def test_a_split_without_memory_changes_nothing(monkeypatch):
    cache, tokens = PrefixCache(), [0, 1, 2, 0]
    cache.insert(tokens, reader(tokens))
    left = [1]

    def copy(memory):
        if not left:
            raise RuntimeError("can't allocate memory")
        left.pop()
        return memory.clone()

    with monkeypatch.context() as patch:
        patch.setattr(prefix_cache, "_copy", copy)
        with pytest.raises(RuntimeError, match="allocate"):
            cache.insert([0, 1, 1], reader([0, 1, 1]))
    assert (cache.tokens, cache.missing(tokens)) == (4, 0)
    assert held(cache, tokens) == reader(tokens)(0, 4).flatten().tolist()

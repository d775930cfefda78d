from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from slime.rollout.mixture import Interleave

WEIGHTS = st.lists(
    st.one_of(st.integers(1, 50), st.floats(0.001, 5.0, allow_nan=False)), min_size=1, max_size=7
)


@given(WEIGHTS, st.integers(0, 99), st.integers(1, 300))
def test_every_share_holds_at_every_moment(weights, seed, draws):
    order = Interleave(weights, seed)
    shares = [Fraction(str(weight)) for weight in weights]
    total = sum(shares)
    for number in range(1, draws + 1):
        order.next()
        assert sum(order.counts) == number
        for count, share in zip(order.counts, shares, strict=True):
            assert abs(count - number * share / total) < 1


@given(WEIGHTS, st.integers(0, 99), st.integers(0, 60))
def test_the_order_follows_from_weights_seed_and_counts(weights, seed, before):
    order = Interleave(weights, seed)
    for _ in range(before):
        order.next()
    resumed = Interleave(weights, seed)
    resumed.counts = list(order.counts)
    assert [resumed.next() for _ in range(20)] == [order.next() for _ in range(20)]


def test_the_seed_decides_between_equals():
    firsts = {Interleave([1.0, 1.0], seed).next() for seed in range(20)}
    assert firsts == {0, 1}

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime.rollout.passing import has_passed, pass_at_k, pass_rates

COUNTS = st.integers(1, 7).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n), st.integers(1, n)))


@given(COUNTS)
def test_pass_at_k_is_the_share_of_draws_with_a_hit(case):
    correct, total, k = case
    draws = list(combinations([True] * correct + [False] * (total - correct), k))
    assert pass_at_k(correct, total, k) == pytest.approx(sum(map(any, draws)) / len(draws))


@given(st.lists(st.lists(st.booleans(), max_size=9), max_size=5))
def test_pass_rates_are_told_for_powers_of_two_and_rise_with_k(groups):
    rates = pass_rates(groups)
    most = max(map(len, groups), default=0)
    assert list(rates) == [k for k in (1, 2, 4, 8) if k <= most]
    if len(set(map(len, groups))) == 1:
        assert list(rates.values()) == sorted(rates.values())


@given(st.integers(0, 6), st.integers(1, 6), st.integers(1, 4))
def test_the_estimate_is_unbiased(correct, total, k):
    """Over all ways to draw n answers from a pool, its mean is pass@k of the pool itself."""
    if k > total:
        return
    pool = [True] * correct + [False] * (6 - correct)
    draws = list(combinations(pool, total))
    mean = sum(pass_at_k(sum(draw), total, k) for draw in draws) / len(draws)
    assert mean == pytest.approx(pass_at_k(correct, 6, k))


def test_without_a_threshold_only_0_and_1_say_whether_a_rollout_passed():
    said = [has_passed(reward, None) for reward in (0.0, 1.0, 0.5, 2.0, -1.0)]
    assert said == [False, True, None, None, None]
    assert [has_passed(reward, 0.5) for reward in (0.4, 0.5, -1.0)] == [False, True, False]

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime.train.schedule import split_steps
from tests.train.rows import row


@given(st.lists(st.integers(1, 3), min_size=1, max_size=20), st.integers(1, 7), st.integers(0, 99))
def test_every_rollout_is_whole_and_in_exactly_one_step(cuts, size, seed):
    samples = [row(10 * i + k, rollout=i) for i, n in enumerate(cuts) for k in range(n)]
    steps = split_steps(samples, rollouts_per_step=size)
    assert sorted(s.index for step in steps for s in step) == sorted(s.index for s in samples)
    members = [{s.rollout_id for s in step} for step in steps]
    sizes = [len(ids) for ids in members]
    assert len(sizes) == -(-len(cuts) // size)
    assert max(sizes) <= size
    assert max(sizes) - min(sizes) <= 1
    assert [rollout for ids in members for rollout in sorted(ids)] == list(range(len(cuts)))
    shuffled = random.Random(seed).sample(samples, len(samples))
    again = split_steps(shuffled, rollouts_per_step=size)
    assert [{s.rollout_id for s in step} for step in again] == members


def test_rows_without_vote_are_in_no_step():
    assert split_steps([row(0, votes=False)], rollouts_per_step=2) == []


def test_a_step_of_no_rollouts_is_refused():
    with pytest.raises(ValueError, match="at least 1"):
        split_steps([row(0)], rollouts_per_step=0)

"""Rollouts that wait for a full step: whole, with their own advantages, under ids of their own."""

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from slime.train.batch import TokenRewards, TurnRewards
from slime.train.carry import Waiting, from_json, full_steps, renumbered, to_json
from tests.train.rows import row


@given(st.lists(st.integers(1, 3), max_size=20), st.integers(1, 7))
def test_steps_are_full_and_what_is_left_would_not_fill_one(cuts, size):
    samples = [row(10 * i + k, rollout=i) for i, n in enumerate(cuts) for k in range(n)]
    steps, rest = full_steps(samples[::-1], rollouts_per_step=size)
    assert all(len({s.rollout_id for s in step}) == size for step in steps)
    assert len({s.rollout_id for s in rest}) == len(cuts) % size
    listed = [s for step in [*steps, rest] for s in step]
    assert sorted(s.index for s in listed) == sorted(s.index for s in samples)
    order = list(dict.fromkeys(s.rollout_id for s in listed))
    assert order == list(range(len(cuts)))


def test_rows_without_vote_wait_for_nothing():
    assert full_steps([row(0, votes=False)], rollouts_per_step=2) == ([], [])


def test_new_ids_are_negative_and_keep_rollouts_groups_and_order():
    rows = [row(0, rollout=4, group=2), row(3, rollout=4, group=2), row(1, rollout=9, group=2)]
    found = [w.sample for w in renumbered(Waiting(r, (0.5, 0.5)) for r in rows)]
    assert [s.rollout_id for s in found] == [-2, -2, -1]
    assert len({s.index for s in found}) == 3 and max(s.index for s in found) < 0
    assert {s.group_index for s in found} == {-1}
    again = renumbered(Waiting(s, (0.5, 0.5)) for s in [*found, row(0)])
    assert [w.sample.rollout_id for w in again] == [-3, -3, -2, -1]


def test_rows_are_read_back_as_they_were_written():
    plain = row(-1, 0.1, rollout=-5, log_probs=(-0.1, -1 / 3))
    rows = [
        Waiting(plain, (0.1, -2 / 3)),
        Waiting(replace(plain, reward=TokenRewards((0.0, 1.0)), teacher_log_probs=(-1.0, -2.0)), (1.0, 0.0)),
        Waiting(
            replace(plain, reward=TurnRewards((0.5,)), rollout_log_probs=None, raw_reward=2.0), (0.0, 0.0)
        ),
    ]
    assert from_json(to_json(rows)) == rows


def test_routes_of_experts_wait_with_their_row():
    routes = np.arange(12, dtype=np.int32).reshape(2, 2, 3)
    (found,) = from_json(to_json([Waiting(replace(row(0), routed_experts=routes), (0.5, 0.5))]))
    assert np.array_equal(found.sample.routed_experts, routes)
    assert found.sample.routed_experts.dtype == np.int32

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from slime.train.synthetic import cut_rollouts, synthetic_rollouts

seeds = st.integers(0, 2**20)
pieces_st = st.sampled_from([1, 2, 5, "uneven"])


def trained(rows):
    """History and token of everything that trains, by rollout, in order."""
    found = {}
    for row in sorted(rows, key=lambda row: (row.rollout_id, row.index)):
        for place, flag in enumerate(row.loss_mask if row.votes else ()):
            if flag:
                end = row.prompt_length + place
                log_probs = row.rollout_log_probs[place], row.teacher_log_probs[place]
                found.setdefault(row.rollout_id, []).append((row.tokens[: end + 1], log_probs))
    return found


@settings(deadline=None)
@given(seeds, pieces_st, st.booleans())
def test_every_cut_trains_the_same_tokens_behind_the_same_histories(seed, pieces, carries):
    whole = synthetic_rollouts(seed)
    rows = cut_rollouts(whole, pieces, random.Random(seed), carries_history=carries)
    assert trained(rows) == trained(whole)
    assert len({row.index for row in rows}) == len(rows)
    assert {row.rollout_id for row in rows} == {row.rollout_id for row in whole}
    assert all(row.trained_tokens for row in rows if row.votes)


@settings(deadline=None)
@given(seeds, pieces_st)
def test_parts_of_a_reward_add_up_to_it(seed, pieces):
    whole = synthetic_rollouts(seed)
    rows = cut_rollouts(whole, pieces, random.Random(seed), shares_reward=True)
    for sample in whole:
        if sample.votes:
            parts = [row.reward for row in rows if row.rollout_id == sample.rollout_id]
            assert abs(sum(parts) - sample.reward) < 1e-12

"""Two runs have equal digests exactly if the same rows trained in the same steps."""

from dataclasses import replace

from slime.ray.lineage import Trained
from tests.backends.rollouts import cut, group_samples

FIRST, SECOND = group_samples(seed=1), group_samples(seed=2)


def test_rollouts_are_counted_once_and_rows_each():
    siblings = [*cut(FIRST[0], 2, first_index=100), *FIRST[1:]]
    found = Trained().after(siblings)
    assert (found.rollouts, found.samples) == (6, 7)
    assert found.after(SECOND).rollouts == 12


def test_the_order_of_rows_and_their_numbers_in_the_batch_do_not_count():
    moved = [replace(sample, index=n) for n, sample in enumerate(reversed(FIRST))]
    assert Trained().after(moved) == Trained().after(FIRST)


def test_everything_that_training_sees_counts():
    found = Trained().after(FIRST).digest
    row = FIRST[0]
    changes = [
        {"rollout_id": 99},
        {"group_index": 99},
        {"tokens": (*row.tokens[:-1], 258)},
        {"loss_mask": (0, *row.loss_mask[1:])},
        {"reward": row.reward + 2**-40},
        {"rollout_log_probs": (-2.0, *row.rollout_log_probs[1:])},
        {"policy_version": 7},
        {"response_length": row.response_length - 1, "loss_mask": row.loss_mask[1:]},
    ]
    others = [Trained().after([replace(row, **change), *FIRST[1:]]).digest for change in changes]
    assert len({found, *others}) == 1 + len(changes)


def test_a_row_twice_a_row_less_and_the_order_of_steps_count():
    digests = [
        Trained().after(FIRST).after(SECOND).digest,
        Trained().after(SECOND).after(FIRST).digest,
        Trained().after([*FIRST, *SECOND]).digest,
        Trained().after([*FIRST, FIRST[0]]).after(SECOND).digest,
        Trained().after(FIRST[1:]).after(SECOND).digest,
    ]
    assert len(set(digests)) == 5


def test_rows_that_do_not_vote_train_nothing():
    silent = replace(FIRST[0], votes=False, reward=float("nan"))
    assert Trained().after([silent, *FIRST[1:]]) == Trained().after(FIRST[1:])

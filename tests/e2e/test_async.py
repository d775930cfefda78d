"""Rollouts that overlap training: one step ahead, fully asynchronous, and continued over steps."""

import json

import pytest

from slime.rollout.events import read_events
from slime.rollout.replay import replay

FULLY_ASYNC = "slime.rollout.fully_async_rollout.generate_rollout_fully_async"
POLICIES = {
    "ahead": {"async_training": True},
    "fully": {"rollout_function_path": FULLY_ASYNC, "max_staleness": 2},
    "waits": {"rollout_function_path": FULLY_ASYNC, "update_in_flight": "wait"},
    "partial": {"partial_rollout": True, "over_sampling_batch_size": 6},
}
BOUND = {"ahead": 1, "fully": 2, "waits": 2, "partial": None}
STEPS = 6


def steps_of(world, name):
    return [row for row in world.metrics(name) if "train/loss" in row]


def check_identity(rows):
    """Law 5 in every step and over all: what is told as submitted and carried is where it is told to be."""
    carried = 0
    for row in rows:
        count = {
            key.split("/")[2]: value
            for key, value in row.items()
            if key.startswith("rollout/accounting/") and key.count("/") == 2
        }
        assert count.pop("carried") == carried
        submitted, carried = count.pop("submitted"), count["in_flight"]
        assert row["rollout/accounting/carried"] + submitted == sum(count.values())


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_learns_within_its_bound_and_loses_nothing(world, policy):
    text = world.train(policy, num_rollout=STEPS, **POLICIES[policy])
    rows = steps_of(world, policy)
    assert len(rows) == STEPS, text
    check_identity(rows)
    for row in rows:
        assert row["rollout/accounting/trained"] == 16
        assert 0 <= row["rollout/wasted_ratio"] <= 1
        if BOUND[policy] is not None:
            assert row["rollout/oldest_token_age"] <= BOUND[policy]
            assert row["rollout/accounting/requeued"] == 0
    assert max(row["rollout/oldest_token_age"] for row in rows) >= 1 or policy == "partial"
    rewards = world.rewards(policy)
    assert sum(rewards[-2:]) / 2 > sum(rewards[:2]) / 2
    again = replay(read_events(world.folder / policy / "events.jsonl"))
    assert len(again) == STEPS and all(batch.same for batch in again)


def test_a_run_that_is_stopped_gives_out_again_what_was_in_flight(world):
    save = world.folder / "again-ckpt"
    flags = POLICIES["fully"] | {"save": save, "save_interval": 1}
    world.train("again", num_rollout=3, **flags)
    held = json.loads((save / "rollout" / "unfinished_2.json").read_text())
    assert held
    groups = {group[0]["group_index"] for group in held}
    world.train("again", num_rollout=5, load=save, **flags)
    events = list(read_events(world.folder / "again" / "events.jsonl"))
    second = max(place for place, event in enumerate(events) if event["event"] == "log")
    started = [event["group"] for event in events[second:] if event["event"] == "start"]
    assert groups <= set(started)
    trained = [group for event in events if event["event"] == "close" for group in event["groups"]]
    assert len(trained) == len(set(trained)) == 5 * 4


def test_evaluations_have_an_engine_of_their_own_and_do_not_stop_training(world):
    flags = POLICIES["fully"] | {"eval_own_engine": True, "eval_interval": 1}
    text = world.train(
        "aside", num_rollout=3, eval_prompt_data=["sums", world.data], n_samples_per_eval_prompt=2, **flags
    )
    rows = [row for row in world.metrics("aside") if "eval/sums" in row]
    assert sorted(row["step"] for row in rows) == [0, 1, 2, 3], text
    assert all(row["eval/sums/rollouts"] == 24 for row in rows)
    assert len(steps_of(world, "aside")) == 3
    assert (world.folder / "aside" / "logs" / "evaluation_engine.log").is_file()

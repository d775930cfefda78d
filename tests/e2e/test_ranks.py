"""Runs whose trainer is several processes: they learn the same, save, resume as fewer, and die by name."""

import re
import time

import psutil
import pytest

from tests.e2e.kills import steps_logged

pytestmark = pytest.mark.slow


def losses(world, name):
    return [row["train/loss"] for row in world.metrics(name) if "train/loss" in row]


@pytest.fixture(scope="module")
def pair(world):
    """Two processes, two rollout steps of two optimizer steps each."""
    text = world.train(
        "pair",
        actor_num_gpus_per_node=2,
        global_batch_size=8,
        save=world.folder / "pair-ckpt",
        check_weight_update_equal=True,
        save_hf=world.folder / "pair-hf",
        save_debug_rollout_data=world.folder / "pair" / "rollouts" / "{rollout_id}.jsonl",
    )
    return world, text


def test_engine_and_trainer_agree_in_every_step(pair):
    world, text = pair
    assert "start-up check: log-prob gap" in text
    gaps = [
        row["train/train_rollout_logprob_abs_diff"] for row in world.metrics("pair") if "train/loss" in row
    ]
    assert len(gaps) == 2 and max(gaps) < 1e-4


def test_one_process_trains_on_the_same_rollouts_to_the_same_weights(pair):
    from transformers import AutoModelForCausalLM

    world, _ = pair
    world.train(
        "single",
        global_batch_size=8,
        load_debug_rollout_data=world.folder / "pair" / "rollouts" / "{rollout_id}.jsonl",
        prompt_data=None,
        label_key=None,
        save_hf=world.folder / "single-hf",
    )
    assert losses(world, "single") == pytest.approx(losses(world, "pair"), rel=1e-4, abs=1e-6)
    ours, theirs = (
        dict(AutoModelForCausalLM.from_pretrained(world.folder / name).named_parameters())
        for name in ("pair-hf", "single-hf")
    )
    assert max((ours[key] - theirs[key]).abs().max() for key in theirs) < 1e-4


def test_one_process_goes_on_from_the_checkpoint_of_two(pair):
    world, _ = pair
    text = world.train("resumed-alone", num_rollout=3, global_batch_size=8, load=world.folder / "pair-ckpt")
    assert "after rollout step 1, policy 2" in text
    assert len(losses(world, "resumed-alone")) == 1


def test_a_killed_rank_ends_the_run_with_its_name(world):
    process = world.start("killed", actor_num_gpus_per_node=2, num_rollout=1000)
    actors = []
    until = time.monotonic() + 300
    while steps_logged(world.folder / "killed" / "metrics.jsonl") < 2:
        assert time.monotonic() < until and process.poll() is None, world.log("killed")
        time.sleep(0.2)
    for child in psutil.Process(process.pid).children(recursive=True):
        if "TrainActor" in " ".join(child.cmdline()):
            actors.append(child)
    assert len(actors) == 2, world.log("killed")
    max(actors, key=lambda actor: actor.create_time()).kill()
    assert process.wait(timeout=180) != 0
    text = world.log("killed")
    assert re.search(r"trainer rank [01] of 2: its process died", text), text

"""Law of resume: kills without warning change neither what is trained nor the weights, not by a bit.

``SLIME_TEST_KILLS`` sets how many kills there are, ``SLIME_TEST_SEED`` where they fall.
"""

import json
import os
import random
from collections import Counter

import pytest

from tests.e2e.kills import Life, live_and_die, until

pytestmark = pytest.mark.slow

KILLS = int(os.environ.get("SLIME_TEST_KILLS", "3"))
SEED = int(os.environ.get("SLIME_TEST_SEED", "0"))
STEPS = 3 * KILLS + 4


def flags(world, name):
    """Groups that go back, failed rollouts, random timing, a schedule, a shuffled data set, pruning."""
    folder = world.folder / name
    return world.flags(
        name,
        num_rollout=STEPS,
        deterministic_mode=True,
        over_sampling_batch_size=6,
        rollout_shuffle=True,
        num_steps_per_rollout=2,
        custom_generate_function_path="tests.e2e.hooks.dawdles",
        lr_decay_style="cosine",
        lr_warmup_iters=3,
        save=folder / "checkpoint",
        load=folder / "checkpoint",
        save_interval=1,
        keep_checkpoints=2,
        save_debug_rollout_data=folder / "rollouts" / "{rollout_id}.jsonl",
        no_use_tensorboard=True,
    )


def manifest(world, name):
    (_, last) = sorted((world.folder / name / "checkpoint").glob("step_*"))
    return json.loads((last / "manifest.json").read_text())


def samples(world, name):
    """How often each sample is in the dumps."""
    found = Counter()
    for step in range(STEPS):
        for line in (world.folder / name / "rollouts" / f"{step}.jsonl").read_text().splitlines():
            row = json.loads(line)
            tokens, log_probs = tuple(row["tokens"]), tuple(row["rollout_log_probs"] or ())
            found[step, row["rollout_id"], row["status"], row["reward"], tokens, log_probs] += 1
    return found


def test_law_5_kills_change_neither_the_trained_samples_nor_the_weights(world):
    straight = Life(flags(world, "straight"), world.folder / "straight.log")
    until(straight, straight.has_begun)
    start = straight.age()
    assert straight.process.wait(timeout=900) == 0, straight.log.read_text()

    rng = random.Random(SEED)
    for number in range(KILLS):
        life = Life(flags(world, "killed"), world.folder / f"killed-{number}.log")
        where = live_and_die(life, world.folder / "killed" / "metrics.jsonl", rng, start=start)
        print(f"life {number}: {where}", flush=True)
        assert where != "ended", life.log.read_text()
    life = Life(flags(world, "killed"), world.folder / "killed-last.log")
    assert life.process.wait(timeout=900) == 0, life.log.read_text()

    expected, found = manifest(world, "straight"), manifest(world, "killed")
    assert found["rollout_id"] == STEPS - 1
    assert found["trained"] == expected["trained"]
    assert found["parts"] == expected["parts"]
    assert samples(world, "killed") == samples(world, "straight")
    steps = [row["step"] for row in world.metrics("killed") if "rollout/step" in row]
    assert steps == list(range(STEPS))
    kept = [f"data_source_{step}.json" for step in (STEPS - 2, STEPS - 1)]
    positions = (world.folder / "killed" / "checkpoint" / "rollout").iterdir()
    assert sorted(path.name for path in positions) == sorted(kept)

"""Offline verbs with the real embedded engine: rollouts that a run then trains on, and a mixture in a run."""

import json
import os
import subprocess
import sys

import pytest

from slime.rollout.dump import load_file
from tests.e2e.conftest import ROOT

pytestmark = pytest.mark.slow


def offline(world, verb, name, *words):
    command = [sys.executable, "-m", "slime.cli", verb, "--hf-checkpoint", str(world.model)]
    command += ["--output", str(world.folder / name), "--rollout-max-response-len", "8", *words]
    command += ["--custom-rm-path", "tests.e2e.hooks.low_bytes", "--engine-num-threads", "1"]
    env = dict(os.environ) | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_offline_rollouts_are_trained_on(world):
    prompts = ("--prompt-data", str(world.data), "--apply-chat-template", "--n-samples-per-prompt", "4")
    offline(world, "rollout", "pool", *prompts, "--limit", "8", "--rollout-batch-size", "4")
    dumps = world.folder / "pool" / "rollouts" / "{rollout_id}.jsonl"
    assert len(load_file(str(dumps).replace("{rollout_id}", "1"))) == 16
    world.train("from-pool", load_debug_rollout_data=dumps, prompt_data=None, label_key=None)
    assert len([row for row in world.metrics("from-pool") if "train/loss" in row]) == 2


def test_an_offline_evaluation_is_the_one_of_a_run(world):
    """Greedy, the same model: the same score, to the last digit."""
    sets = (
        "--eval-prompt-data",
        "small",
        str(world.data),
        "--apply-chat-template",
        "--eval-temperature",
        "0",
    )
    offline(world, "eval", "evals", *sets)
    values = json.loads((world.folder / "evals" / "metrics.json").read_text())["metrics"]
    world.train("with-eval", eval_prompt_data=["small", world.data], eval_temperature=0, num_rollout=1)
    first = next(row for row in world.metrics("with-eval") if "eval/small" in row)
    assert first["eval/small"] == values["eval/small"]
    assert first["eval/small/rollouts"] == values["eval/small/rollouts"] == 12


def test_an_engine_of_our_own_that_ends_is_the_error(world):
    words = ["--hf-checkpoint", str(world.model), "--output", str(world.folder / "dies")]
    words += ["--prompt-data", str(world.data), "--apply-chat-template", "--rollout-max-response-len", "8"]
    words += ["--custom-generate-function-path", "tests.e2e.hooks.ends_the_engine"]
    words += ["--custom-rm-path", "tests.e2e.hooks.low_bytes"]
    command = [sys.executable, "-m", "slime.cli", "rollout", *words]
    env = dict(os.environ) | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env, timeout=300)
    assert done.returncode == 2
    assert "the embedded engine process was killed by signal 9" in done.stderr


def test_a_run_mixes_data_sets_under_a_curriculum(world):
    more = world.folder / "more.jsonl"
    more.write_text(world.data.read_text())
    world.train(
        "mixed",
        prompt_data=[world.data, more],
        prompt_data_weights=[3, 1],
        data_source_path="slime.rollout.curriculum.CurriculumDataSource",
        rollout_all_samples_process_path="slime.rollout.filter_hub.pass_rate.record_pass_rates",
        pass_threshold=0.5,
    )
    steps = [row for row in world.metrics("mixed") if "rollout/raw_reward" in row]
    assert [row["rollout/dataset/data/rollouts"] for row in steps] == [12, 12]
    assert all("rollout/curriculum/useful" in row for row in steps)
    assert [row["rollout/dataset/more/rollouts"] for row in steps] == [4, 4]

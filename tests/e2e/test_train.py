"""The whole loop on the cluster's code path: rollouts, training, weight updates, checkpoints, export."""

import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from tests.e2e.conftest import ROOT


@pytest.fixture(scope="module")
def run(world):
    """One run that is looked at from all sides."""
    text = world.train(
        "whole",
        num_rollout=6,
        eval_prompt_data=["sums", world.data],
        save=world.folder / "whole-ckpt",
        save_interval=3,
        save_hf=world.folder / "whole-hf",
        save_debug_rollout_data=world.folder / "whole" / "rollouts" / "{rollout_id}.jsonl",
    )
    return world, text


def test_the_policy_learns(run):
    world, _ = run
    rewards = world.rewards("whole")
    assert len(rewards) == 6
    assert sum(rewards[-2:]) / 2 > sum(rewards[:2]) / 2 + 0.05


def test_the_plan_and_the_start_up_check_are_shown(run):
    _, text = run
    assert "4 prompts x 4 = 16 rollouts" in text
    assert "start-up check: log-prob gap" in text


def test_engine_and_trainer_agree_in_every_step(run):
    world, _ = run
    gaps = [
        row["train/train_rollout_logprob_abs_diff"] for row in world.metrics("whole") if "train/loss" in row
    ]
    assert len(gaps) == 6 and max(gaps) < 1e-4


def test_law_5_every_step_accounts_for_its_rollouts(run):
    world, _ = run
    rows = [row for row in world.metrics("whole") if "rollout/accounting/submitted" in row]
    assert len(rows) == 6
    for row in rows:
        fates = {
            key.split("/")[2]: value
            for key, value in row.items()
            if key.startswith("rollout/accounting/") and key.count("/") == 2
        }
        submitted = fates.pop("submitted") + fates.pop("carried")
        assert submitted == sum(fates.values()) and fates["trained"] == 16


def test_law_7_the_policy_version_of_a_step_is_on_its_samples(run):
    world, _ = run
    for step in range(6):
        dump = world.folder / "whole" / "rollouts" / f"{step}.jsonl"
        samples = [json.loads(line) for line in dump.read_text().splitlines()]
        assert {version for sample in samples for version in sample["weight_versions"]} == {str(step)}


def test_the_export_is_a_hugging_face_folder(run):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    world, _ = run
    folder = world.folder / "whole-hf"
    model = AutoModelForCausalLM.from_pretrained(folder)
    ids = AutoTokenizer.from_pretrained(folder)("hello", return_tensors="pt").input_ids
    first = AutoModelForCausalLM.from_pretrained(world.model)
    with torch.no_grad():
        assert (model(ids).logits - first(ids).logits).abs().max() > 1e-4


def test_view_shows_the_run(run):
    world, _ = run
    command = [sys.executable, "-m", "slime.cli", "view", str(world.folder / "whole")]
    shown = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True).stdout
    assert "reward" in shown and ("completed" in shown or "truncated" in shown)


def test_a_resumed_run_goes_on_where_the_checkpoint_was(run):
    world, _ = run
    checkpoint = world.folder / "whole-ckpt"
    (checkpoint / "step_000005" / "manifest.json").rename(checkpoint / "step_000005" / "hidden")
    text = world.train("resumed", num_rollout=6, load=checkpoint)
    assert "checkpoint step_000005 is skipped: it was not finished" in text
    assert "after rollout step 2, policy 3" in text
    steps = [row["step"] for row in world.metrics("resumed") if "rollout/raw_reward" in row]
    assert steps == [3, 4, 5]


def test_no_process_is_left(run):
    world, _ = run
    left = [p.info["cmdline"] for p in psutil.process_iter(["cmdline"]) if str(world.model) in str(p.info)]
    assert not left


def test_training_from_dumps_needs_no_engine(run):
    world, _ = run
    dumps = world.folder / "whole" / "rollouts" / "{rollout_id}.jsonl"
    world.train("from-dumps", load_debug_rollout_data=dumps, prompt_data=None, label_key=None)
    assert not (world.folder / "from-dumps" / "logs" / "engine.log").exists()
    assert len([row for row in world.metrics("from-dumps") if "train/loss" in row]) == 2


def test_rollouts_alone_need_no_trainer(world):
    world.train("rollout-only", debug_rollout_only=True)
    assert len(world.rewards("rollout-only")) == 2
    assert not [row for row in world.metrics("rollout-only") if "train/loss" in row]


def test_law_1_and_2_fan_out_counts_a_rollout_once(world):
    world.train(
        "fan-out",
        custom_generate_function_path="tests.e2e.hooks.two_siblings",
        save_debug_rollout_data=world.folder / "fan-out" / "{rollout_id}.jsonl",
    )
    samples = [json.loads(line) for line in (world.folder / "fan-out" / "0.jsonl").read_text().splitlines()]
    by_rollout: dict[int, int] = {}
    for sample in samples:
        by_rollout[sample["rollout_id"]] = by_rollout.get(sample["rollout_id"], 0) + 1
    assert len(samples) == 32 and set(by_rollout.values()) == {2}


def test_law_4_a_failing_hook_fails_its_rollout_and_the_run_goes_on(world):
    text = world.train("some-raise", custom_generate_function_path="tests.e2e.hooks.raises_for_some")
    rows = [row for row in world.metrics("some-raise") if "rollout/raw_reward" in row]
    assert len(rows) == 2
    assert any(row.get("rollout/accounting/failed", 0) > 0 for row in rows), text


def test_too_many_failures_stop_the_run_with_the_reason(world):
    text = world.train("all-raise", code=2, custom_generate_function_path="tests.e2e.hooks.always_raises")
    assert "RolloutFailedError" in text and "nothing works" in text
    assert "--max-failed-rollout-ratio" in text


def test_a_reward_that_is_no_number_stops_the_run_and_names_the_hook(world):
    text = world.train("none-reward", code=2, custom_rm_path="tests.e2e.hooks.none_reward")
    assert "tests.e2e.hooks.none_reward returned None, which is not a finite number" in text


def test_law_6_a_rollout_step_past_its_deadline_tells_what_is_in_flight(world):
    hook = "tests.e2e.hooks.slow"
    for seconds in (30, 150):  # the start has to be within it, too
        limits = {"phase_timeout": seconds}
        text = world.train(f"stuck-{seconds}", code=2, custom_generate_function_path=hook, **limits)
        if "rollout step 0 is not done" in text:
            break
    assert f"rollout step 0 is not done after {seconds} s; in flight:" in text
    assert f"rollout 0 (group 0): generate in {hook} for" in text


def test_an_engine_that_dies_while_generating_ends_the_run_with_its_log(world):
    process = world.start("killed", num_rollout=1000, rollout_max_response_len=900)
    engine = _engine_of(process)
    _wait_for(lambda: "start-up check" in world.log("killed"))
    engine.kill()
    assert process.wait(timeout=180) == 2
    text = world.log("killed")
    assert "engine" in text and "killed by signal 9" in text


def test_an_interrupt_saves_what_is_finished_and_leaves_nothing(world):
    checkpoint = world.folder / "stopped-ckpt"
    process = world.start("stopped", num_rollout=1000, save=checkpoint)
    engine = _engine_of(process)
    _wait_for(lambda: (world.folder / "stopped" / "metrics.jsonl").read_text().count("raw_reward") >= 2)
    os.kill(process.pid, signal.SIGINT)
    assert process.wait(timeout=180) == 130
    (manifest,) = checkpoint.glob("step_*/manifest.json")
    done = json.loads(manifest.read_text())["rollout_id"] + 1
    position = json.loads((checkpoint / "rollout" / f"data_source_{done - 1}.json").read_text())
    assert position["sample_index"] == done * 16  # prompts of the interrupted step are not used up
    assert not engine.is_running()


def test_an_interrupt_during_the_start_ends_the_run(world):
    process = world.start("stopped-early")
    _engine_of(process)
    os.kill(process.pid, signal.SIGINT)
    assert process.wait(timeout=180) == 130
    assert "stopped before the first step" in world.log("stopped-early")


def _engine_of(process: subprocess.Popen) -> psutil.Process:
    """The engine's process below a run, once it is there."""
    found: list[psutil.Process] = []

    def look() -> bool:
        assert process.poll() is None
        for child in psutil.Process(process.pid).children(recursive=True):
            try:
                words = child.cmdline()
            except psutil.Error:
                continue
            if "serve" in words:
                found.append(child)
        return bool(found)

    _wait_for(look)
    return found[0]


def _wait_for(condition, timeout: float = 300) -> None:
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        try:
            if condition():
                return
        except FileNotFoundError:
            pass
        time.sleep(0.2)
    raise AssertionError("did not happen in time")

"""Faults of whole runs: processes that die, signals, a full disk. Declared: exit code and message.

Whatever happens, no process is left, the run says why it ended, and a run that goes on from the checkpoint
trains no rollout twice. ``SLIME_TEST_ALL_FAULTS=1`` strikes each policy with each fault.
"""

import json
import os
import resource
import signal
import time
from collections import Counter
from dataclasses import dataclass

import psutil
import pytest

from slime.rollout.events import read_events
from tests.e2e.kills import Life, marked, steps_logged, until_gone

FULLY_ASYNC = "slime.rollout.fully_async_rollout.generate_rollout_fully_async"
POLICIES = {
    "synchronous": {},
    "partial": {"partial_rollout": True, "over_sampling_batch_size": 6},
    "ahead": {"async_training": True},
    "fully": {"rollout_function_path": FULLY_ASYNC, "max_staleness": 2},
}
FAILED, INTERRUPTED = 2, 130


@dataclass(frozen=True)
class Fault:
    """What happens to a process of the run, and what is declared to come of it.

    Attributes:
        process: words of the title or command line of its process; None is the run itself.
        number: the signal.
        code: exit code of the run.
        message: what it says.
    """

    process: str | None
    number: int
    code: int
    message: str


FAULTS = {
    "trainer is killed": Fault("TrainActor", signal.SIGKILL, FAILED, "trainer: its process died"),
    "rollout manager is killed": Fault(
        "RolloutManager", signal.SIGKILL, FAILED, "rollout manager: its process died"
    ),
    "engine is killed": Fault("slime.cli serve", signal.SIGKILL, FAILED, "killed by signal 9"),
    "engine actor is killed": Fault("EngineActor", signal.SIGKILL, FAILED, "engine: its process died"),
    "SIGINT": Fault(None, signal.SIGINT, INTERRUPTED, "stopping: saving what is finished"),
    "SIGTERM": Fault(None, signal.SIGTERM, INTERRUPTED, "stopping: saving what is finished"),
}
QUICK = [("synchronous", "SIGTERM")]
SLOW = [
    ("fully", "trainer is killed"),
    ("ahead", "rollout manager is killed"),
    ("fully", "engine is killed"),
    ("synchronous", "engine actor is killed"),
    ("partial", "SIGINT"),
]
ALL = [(policy, name) for policy in POLICIES for name in FAULTS]
if not os.environ.get("SLIME_TEST_ALL_FAULTS"):
    ALL = [*QUICK, *SLOW]


def begin(world, name, **flags) -> Life:
    flags = {"num_rollout": 1000, "save": world.folder / f"{name}-ckpt", "save_interval": 1} | flags
    return Life(world.flags(name, **flags), world.folder / f"{name}.log")


def process_of(life, words):
    """The process of the run whose title or command holds these words."""
    for process in marked(life.mark):
        try:
            if words in " ".join(process.cmdline()):
                return process
        except psutil.Error:
            continue
    return None


def wait_for(what, condition, seconds=300.0, poll=0.05):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"{what} did not come"
        time.sleep(poll)


def until_step(life, metrics, count):
    wait_for(
        f"step {count}",
        lambda: life.ended or steps_logged(metrics) >= count,
    )
    assert not life.ended, life.log.read_text()


@pytest.mark.parametrize(
    ("policy", "name"),
    [
        pytest.param(policy, name, marks=[] if (policy, name) in QUICK else [pytest.mark.slow])
        for policy, name in ALL
    ],
)
def test_a_run_ends_with_its_cause_and_leaves_no_process_and_loses_nothing(world, policy, name):
    fault, run = FAULTS[name], f"{policy}-{name.replace(' ', '-')}"
    life = begin(world, run, **POLICIES[policy])
    try:
        until_step(life, world.folder / run / "metrics.jsonl", 2)
        if fault.process is None:
            os.kill(life.process.pid, fault.number)
        else:
            process_of(life, fault.process).send_signal(fault.number)
        struck = time.monotonic()
        assert life.process.wait(timeout=180) == fault.code, life.log.read_text()
        took = time.monotonic() - struck
        until_gone(life)
    finally:
        life.kill()
    assert fault.message in life.log.read_text()
    assert took < 120
    check_resumed(world, run, policy)


def check_resumed(world, run, policy):
    """Two more steps from the checkpoint: what had trained is not trained again, nothing is left out."""
    save = world.folder / f"{run}-ckpt"
    done = max(json.loads(path.read_text())["rollout_id"] for path in save.glob("step_*/manifest.json")) + 1
    world.train(run, num_rollout=done + 2, load=save, save=save, **POLICIES[policy])
    steps = [row for row in world.metrics(run) if "train/loss" in row]
    assert len(steps) == done + 2
    closes = {}
    for event in read_events(world.folder / run / "events.jsonl"):
        if event["event"] == "close":
            closes[event["step"]] = event["groups"]
    groups = Counter(group for step in range(done + 2) for group in closes[step])
    assert max(groups.values()) == 1
    assert len(groups) == (done + 2) * 4


@pytest.mark.slow
def test_a_full_disk_below_the_checkpoints_costs_the_checkpoint_and_not_the_run(world):
    """The trainer may write no file beyond a page, until it may again."""
    life = begin(world, "full", num_rollout=1000)
    log = life.log
    try:
        metrics = world.folder / "full" / "metrics.jsonl"
        until_step(life, metrics, 1)
        trainer = process_of(life, "TrainActor")
        before = trainer.rlimit(psutil.RLIMIT_FSIZE)
        trainer.rlimit(psutil.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
        wait_for("the warning", lambda: life.ended or "not saved, going on" in log.read_text())
        assert not life.ended, log.read_text()
        trainer.rlimit(psutil.RLIMIT_FSIZE, before)
        until_step(life, metrics, steps_logged(metrics) + 2)
        os.kill(life.process.pid, signal.SIGINT)
        assert life.process.wait(timeout=180) == INTERRUPTED
        until_gone(life)
    finally:
        life.kill()
    assert "File too large" in log.read_text()


def test_a_full_disk_below_the_event_log_ends_the_run_with_its_path(world):
    life = begin(world, "full-log", **POLICIES["fully"])
    try:
        until_step(life, world.folder / "full-log" / "metrics.jsonl", 1)
        manager = process_of(life, "RolloutManager")
        size = (world.folder / "full-log" / "events.jsonl").stat().st_size
        manager.rlimit(psutil.RLIMIT_FSIZE, (size + 500, resource.RLIM_INFINITY))
        assert life.process.wait(timeout=180) == FAILED
        until_gone(life)
    finally:
        life.kill()
    assert "events.jsonl: the event log cannot be written: File too large" in life.log.read_text()


@pytest.mark.slow
def test_an_engine_that_is_killed_in_a_weight_update_ends_the_run_with_its_log(world):
    life = begin(world, "update", num_rollout=1000, **POLICIES["fully"])
    try:
        until_step(life, world.folder / "update" / "metrics.jsonl", 1)
        engine = process_of(life, "slime.cli serve")
        owner = process_of(life, "TrainActor")
        wait_for("an update", lambda: "TrainActor.deliver" in " ".join(owner.cmdline()), poll=0.0)
        engine.kill()
        assert life.process.wait(timeout=180) == FAILED
        until_gone(life)
    finally:
        life.kill()
    assert "killed by signal 9" in life.log.read_text()

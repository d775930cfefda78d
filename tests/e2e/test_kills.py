"""kill -9 of any process at random points of a run: it goes on, or says why it ended; law 5 holds over all of
its lives, and each time nothing is left.

``SLIME_TEST_STRIKES`` sets how many processes are killed in a run (each kind once, then again); without it
each kind is killed under one of the policies. ``SLIME_TEST_SEED`` sets where.
"""

import os
import random
import re
import signal
import time
from collections import Counter
from dataclasses import dataclass

import psutil
import pytest

from slime.rollout.events import read_events
from tests.e2e.kills import Life, marked, steps_logged, until
from tests.e2e.leftovers import nothing_left

pytestmark = pytest.mark.slow

FULLY_ASYNC = "slime.rollout.fully_async_rollout.generate_rollout_fully_async"
POLICIES = {
    "synchronous": {},
    "fully": {"rollout_function_path": FULLY_ASYNC, "max_staleness": 2},
}
STEPS, FIRST, LAST = 30, 1, 26
FAILED, RAY_FAILED, KILLED = 2, 1, -9
STRIKE_SECONDS, END_SECONDS = 300.0, 60.0


@dataclass(frozen=True)
class Victim:
    """A process that is killed, and what comes of it.

    Attributes:
        words: in its title or command line.
        cause: what the run says when it ends; None where it goes on.
        codes: exit codes of a run that ends.
    """

    words: str
    cause: str | None = None
    codes: tuple[int, ...] = (FAILED,)


VICTIMS = {
    "engine": Victim("-m slime.cli serve"),
    "guard of an engine": Victim("slime/serving/guard.py .* slime.cli serve"),
    "actor of an engine": Victim("^ray::EngineActor"),
    "router": Victim("(embedded_router|stock_router)"),
    "trainer": Victim("^ray::TrainActor", "trainer: its process died"),
    "rollout manager": Victim("^ray::RolloutManager", "rollout manager: its process died"),
    "raylet": Victim("raylet/raylet ", "Raylet is terminated|its process died", (RAY_FAILED, FAILED)),
    "driver": Victim("-m slime.cli train", "", (KILLED,)),
}
SEED = int(os.environ.get("SLIME_TEST_SEED", "0"))
STRIKES = int(os.environ.get("SLIME_TEST_STRIKES", "0"))


def flags(world, name, policy):
    folder = world.folder / name
    return world.flags(
        name,
        num_rollout=STEPS,
        save=folder / "checkpoint",
        load=folder / "checkpoint",
        save_interval=1,
        keep_checkpoints=2,
        no_use_tensorboard=True,
        rollout_num_gpus=2,
        use_fault_tolerance=True,
        rollout_engine_restarts=max(STRIKES, len(VICTIMS)),
        **POLICIES[policy],
    )


def plan_of(rng, policy):
    """Victims and the steps in which they are struck, every kind once before any again."""
    kinds, order = sorted(VICTIMS), []
    if not STRIKES:
        kinds = kinds[[*POLICIES].index(policy) :: len(POLICIES)]
    count = STRIKES or len(kinds)
    while len(order) < count:
        order += rng.sample(kinds, len(kinds))
    steps = sorted(rng.uniform(FIRST, LAST) for _ in range(count))
    return list(zip(order[:count], steps, strict=True))


def victims_of(life, victim):
    """The processes of the run that these words name; guards carry the words of what they guard."""
    found = []
    for process in marked(life.mark):
        try:
            command = " ".join(process.cmdline())
        except psutil.Error:
            continue
        is_guard = "guard.py" in command
        if re.search(victim.words, command) and is_guard == ("guard.py" in victim.words):
            found.append(process)
    return found


def strike(life, kind, metrics, rng):
    """Kill one, and see what becomes of the run; returns its exit code, or None if it goes on."""
    victim = VICTIMS[kind]
    rng.choice(victims_of(life, victim)).kill()
    before = steps_logged(metrics)
    end = time.monotonic() + STRIKE_SECONDS
    while not life.ended and (victim.cause is not None or steps_logged(metrics) < before + 2):
        assert time.monotonic() < end, f"{kind} was killed, and nothing came of it:\n{life.log.read_text()}"
        time.sleep(0.05)
    if not life.ended:
        return None
    code, text = life.process.returncode, life.log.read_text()
    if victim.cause is not None:
        assert code in victim.codes, text
        assert re.search(victim.cause, text), text
    else:
        assert code == 0, text
    return code


def begin(world, name, policy, lives, left):
    life = Life(flags(world, name, policy), world.folder / f"{name}-{len(lives)}.log")
    left.own(life.process)
    lives.append(life)
    return life


@pytest.mark.parametrize("policy", POLICIES)
def test_law_5_holds_and_nothing_is_left_whichever_process_is_killed(world, policy):
    name, rng, lives = f"struck-{policy}", random.Random(f"{SEED} {policy}"), []
    metrics, strikes = world.folder / name / "metrics.jsonl", plan_of(rng, policy)
    code = None
    try:
        while code != 0:
            with nothing_left(END_SECONDS) as left:
                life = begin(world, name, policy, lives, left)
                code = live(life, strikes, metrics, rng, left)
    finally:
        for life in lives:
            life.kill()
    assert not strikes, f"the run ended before these were struck: {strikes}"
    check_books(world, name, first_steps={first_step(life) for life in lives})
    check_trained_once(world, name)


def live(life, strikes, metrics, rng, left):
    """One life of the run, until a strike or its last step ends it; returns the exit code."""
    while strikes:
        kind, step = strikes.pop(0)
        until(life, lambda step=step: life.has_begun() and steps_logged(metrics) >= int(step))
        time.sleep(rng.uniform(0, 0.7))
        left.look()
        struck = time.monotonic()
        code = strike(life, kind, metrics, rng)
        took = time.monotonic() - struck
        print(f"{life.log.stem}: {kind} killed after step {step:.1f}, {took:.1f} s: {code}", flush=True)
        if code is not None:
            return code
    assert life.process.wait(timeout=600) == 0, life.log.read_text()
    return 0


def first_step(life):
    """The first rollout step of a life."""
    resumed = re.search(r"after rollout step (\d+)", life.log.read_text())
    return int(resumed[1]) + 1 if resumed else 0


def check_books(world, name, steps=STEPS, first_steps=frozenset({0})):
    """The identity in each step: what is carried was in flight before, or is nothing where a life begins."""
    rows = [row for row in world.metrics(name) if "train/loss" in row]
    assert [row["step"] for row in rows] == list(range(steps))
    in_flight = 0
    for row in rows:
        count = {
            key.split("/")[2]: int(value)
            for key, value in row.items()
            if key.startswith("rollout/accounting/") and key.count("/") == 2
        }
        carried = count.pop("carried")
        assert carried == in_flight or (carried == 0 and row["step"] in first_steps), row
        in_flight = count["in_flight"]
        assert carried + count.pop("submitted") == sum(count.values()), row
        assert count["trained"] <= 16 <= count["trained"] + count["failed"]


def check_trained_once(world, name):
    """Of every step the groups of its last life count; none is in two steps."""
    closes = {}
    for event in read_events(world.folder / name / "events.jsonl"):
        if event["event"] == "close":
            closes[event["step"]] = event["groups"]
    groups = Counter(group for step in range(STEPS) for group in closes[step])
    assert max(groups.values()) == 1
    assert len(groups) == STEPS * 4


def test_an_engine_that_hangs_is_found_by_its_health_and_replaced(world):
    """SIGSTOP: its process is there, and its port is open."""
    flags = world.flags(
        "hangs",
        num_rollout=6,
        rollout_num_gpus=2,
        use_fault_tolerance=True,
        rollout_health_check_interval=1,
        rollout_health_check_timeout=8,
        custom_generate_function_path="tests.e2e.hooks.ambles",
    )
    metrics = world.folder / "hangs" / "metrics.jsonl"
    with nothing_left(END_SECONDS) as left:
        life = Life(flags, world.folder / "hangs.log")
        left.own(life.process)
        try:
            until(life, lambda: steps_logged(metrics) >= 1)
            victims_of(life, VICTIMS["engine"])[0].send_signal(signal.SIGSTOP)
            assert life.process.wait(timeout=STRIKE_SECONDS) == 0, life.log.read_text()
        finally:
            life.kill()
    text = life.log.read_text()
    assert "generates no token: no answer of /health_generate within 8 s" in text or (
        "does not answer: no answer of /model_info within 8 s" in text
    )
    assert "its log ends:" in text
    assert "is started again" in text
    check_books(world, "hangs", steps=6)

"""Runs with several engines: behind a router, started by others, and replaced when they are killed."""

import re

import psutil
import pytest

from slime.config.sections import EngineConfig
from slime.serving.embedded.process import EngineProcess
from tests.e2e.kills import Life, marked, steps_logged, until, until_gone
from tests.serving.routing import background_router

GAP = "train/train_rollout_logprob_abs_diff"


def steps_of(world, name):
    return [row for row in world.metrics(name) if "train/loss" in row]


def check(world, name, steps):
    """All steps are there, trained on what engines with the trainer's weights sampled, and add up."""
    rows = steps_of(world, name)
    assert len(rows) == steps
    for row in rows:
        names = ("submitted", "trained", "failed", "requeued")
        count = {name: row[f"rollout/accounting/{name}"] for name in names}
        assert count["trained"] == 16
        assert count["submitted"] == count["trained"] + count["failed"] + count["requeued"]
        assert row[GAP] < 1e-4
    return rows


def test_two_engines_behind_a_router_have_the_weights_of_every_step(world):
    text = world.train("two", rollout_num_gpus=2, num_rollout=3, check_weight_update_equal=True)
    check(world, "two", 3)
    logs = world.folder / "two" / "logs"
    served = [path for path in logs.glob("engine*.log") if "ready" in path.read_text()]
    assert len(served) == 2, text


def test_a_router_of_others_is_left_as_it_was(world):
    with background_router() as router:
        host, port = router.url.removeprefix("http://").split(":")
        world.train("guests", rollout_num_gpus=2, sglang_router_ip=host, sglang_router_port=port)
        check(world, "guests", 2)
        assert router.client.workers() == ()
        assert router.awaited == 0


@pytest.mark.parametrize("transport", ["nccl", "disk"])
def test_engines_of_others_are_used_as_found_and_left_running(world, tmp_path, transport):
    engines = [
        EngineProcess(str(world.model), EngineConfig(num_threads=1), tmp_path / f"{number}.log")
        for number in range(2)
    ]
    try:
        addresses = [engine.url.removeprefix("http://") for engine in engines]
        folder = tmp_path / "weights" if transport == "disk" else None
        world.train(
            f"external-{transport}",
            rollout_external_engine_addrs=addresses,
            update_weight_transport=transport,
            update_weight_disk_dir=folder,
            engine_num_threads=None,
        )
        check(world, f"external-{transport}", 2)
        assert all(engine.is_alive for engine in engines)
    finally:
        for engine in engines:
            engine.stop()


@pytest.mark.parametrize("engines", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_an_engine_that_is_killed_is_replaced_and_nothing_is_lost(world, engines):
    name = f"killed-{engines}"
    flags = world.flags(
        name,
        rollout_num_gpus=engines,
        num_rollout=6,
        use_fault_tolerance=True,
        custom_generate_function_path="tests.e2e.hooks.ambles",
    )
    life = Life(flags, world.folder / f"{name}.log")
    try:
        until(life, lambda: steps_logged(world.folder / name / "metrics.jsonl") >= 1)
        kill_one(life)
        if engines == 1:  # what is started in its place, too: that counts as one more failure
            until(life, lambda: "is started again" in life.log.read_text())
            kill_one(life)
        assert life.process.wait(300) == 0, life.log.read_text()
        until_gone(life)
    finally:
        life.kill()
    text = life.log.read_text()
    assert re.search("is lost: .*(was killed by signal 9|Cannot connect)", text), text
    assert "is started again (2 times more)" in text
    assert ("is started again (1 times more)" in text) == (engines == 1)
    check(world, name, 6)


def kill_one(life):
    """An engine, or one that starts."""
    until(life, lambda: any(map(serves, marked(life.mark))))
    next(filter(serves, marked(life.mark))).kill()


def serves(process):
    """Whether this is an engine, and not what guards one."""
    try:
        words = process.cmdline()
    except psutil.Error:  # it has just ended
        return False
    return words[1:4] == ["-m", "slime.cli", "serve"]

"""The soak: rollouts of eight turns with heavy-tailed latencies and faults, under every policy.

``SLIME_TEST_ROLLOUTS`` sets how many. What must hold: the books are exact in every step, no prompt trains
twice, no token is older than the bound, and memory, tasks, threads and sockets are where they were after the
warm-up.
"""

import asyncio
import gc
import hashlib
import logging
import math
import os
import random
import time
from typing import NamedTuple

import psutil
import pytest

from slime.rollout.accounting import Fate
from slime.rollout.convert import to_train_samples
from slime.rollout.loop import run_blocking
from slime.rollout.sglang_rollout import GenerateState, generate
from slime.rollout.tasks import abandoned_work
from slime.serving.scripted import ScriptedAnswer
from slime.utils.types import Sample
from tests.rollout.kit import ListSource, scripted
from tests.rollout.policies import BOUND, POLICIES, steps

TURNS = 8
TOOL = [40, 41, 42]
SAMPLED = 20
"""Tokens of eight turns; more where a turn was interrupted and continued."""
ROLLOUTS = int(os.environ.get("SLIME_TEST_ROLLOUTS", "1250"))
"""Of each policy; with 5,000 the soak takes a quarter of an hour."""
BATCH, GROUP = 8, 4
DEADLINE = 3.0
SLOTS = 48
MEAN_SECONDS = 0.004
LEAK_BYTES, HEAP_BYTES = 3000, 4 * 2**20
"""What memory may grow by after the warm-up: a rollout, and for the holes of the heap."""
FAULTS = ("engine", "hang", "reward", "hook", "abort")
HERE = "tests.rollout.test_soak."


def fate_of(rollout_id):
    """5 % of the rollouts have a fault; None for the others. The same at every try."""
    draw = random.Random(rollout_id).random()
    return FAULTS[int(draw * 100)] if draw < len(FAULTS) / 100 else None


def seconds_of(rid):
    """Lognormal, with a Pareto tail in every twentieth call; at most a tenth of the deadline."""
    draw = random.Random(rid)
    body = draw.lognormvariate(-0.5, 1.0) * MEAN_SECONDS
    return min(body if draw.random() > 0.05 else draw.paretovariate(1.1) * MEAN_SECONDS * 4, DEADLINE / 10)


def engine(call):
    """Two or three tokens; the fault strikes in the fifth call."""
    turn = list(call.input_ids).count(TOOL[0])
    fault = fate_of(int(call.rid.split("-")[0])) if turn == 4 else None
    if fault == "engine":
        return ScriptedAnswer(error=(500, "out of memory"))
    if fault == "hang":
        return ScriptedAnswer(hang=True)
    count = 2 + turn % 2
    return ScriptedAnswer(token_ids=[70 + turn] * count, token_latency=seconds_of(call.rid) / count)


async def agent(args, sample, sampling_params):
    """Eight turns with the tokens of a tool between them; goes on from where a sample stands."""
    fault = fate_of(sample.rollout_id)
    for turn in range(sample.tokens.count(TOOL[0]), TURNS):
        await generate(args, sample, sampling_params)
        if sample.status is Sample.Status.ABORTED:
            return sample
        if turn == 5 and fault == "hook":
            raise ValueError("the tool is broken")
        if turn == 5 and fault == "abort":
            sample.status, sample.metadata["abort_reason"] = Sample.Status.ABORTED, "the sandbox died"
            return sample
        if turn < TURNS - 1:
            sample.append_response_tokens(tokens=TOOL, log_probs=None, trainable=False)
    sample.status = Sample.Status.COMPLETED
    return sample


async def reward(args, sample, **kwargs):
    if fate_of(sample.rollout_id) == "reward":
        raise ConnectionError("the judge is down")
    return float(hashlib.sha256(bytes(str(sample.index), "ascii")).digest()[0] % 2)


class Resources:
    """What a process holds that a leak would make grow."""

    def __init__(self):
        gc.collect()
        process = psutil.Process()
        self.bytes = process.memory_info().rss
        self.files = process.num_fds()
        self.sockets = len([c for c in process.net_connections() if c.status != psutil.CONN_LISTEN])
        self.threads = process.num_threads()


def check_rows(samples):
    """Of eight turns, or fewer where a rollout was cut, exactly the sampled tokens train."""
    for sample in samples:
        if sample.remove_sample:
            assert sample.reward is None
            continue
        assert sample.loss_mask == [int(token >= 70) for token in sample.tokens[sample.prompt_length :]]
        if "cut" in sample.metadata:
            assert sample.status is Sample.Status.TRUNCATED
            continue
        assert sample.tokens.count(TOOL[0]) == TURNS - 1
        assert sample.effective_response_length >= SAMPLED
        assert fate_of(sample.rollout_id) is None


def oldest(sample):
    spans = sample.metadata["weight_version_spans"]
    assert sum(end - start for _, start, end in spans) == sample.effective_response_length
    return min(int(version) for version, _, _ in spans)


@pytest.fixture
def unlogged():
    """pytest keeps every record of a log to the end, and with it the frames of what was raised."""
    logging.disable()
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.slow
@pytest.mark.usefixtures("unlogged")
@pytest.mark.parametrize("policy", POLICIES)
def test_a_soak_loses_nothing_leaks_nothing_and_stays_within_its_bound(policy):
    count = math.ceil(ROLLOUTS / (BATCH * GROUP))
    started = time.monotonic()
    source = ListSource(size=GROUP, prompt="prompt {}")
    flags = {
        "rollout_batch_size": BATCH,
        "over_sampling_batch_size": 12 if policy in ("synchronous", "partial") else None,
        "sglang_server_concurrency": SLOTS,
        "rollout_max_response_len": 400,
        "turn_timeout": DEADLINE,
        "rollout_timeout": TURNS * DEADLINE,
        "custom_generate_function_path": HERE + "agent",
        "custom_rm_path": HERE + "reward",
    }
    before = Resources()
    with scripted(engine) as server, steps(server, source, policy, **flags) as run:
        after_warm_up = None
        for step in range(count):
            (output,) = run.run(1)
            assert len(output.samples) == BATCH
            check_step(run, output, step)
            server.engine.calls.clear()
            server.engine.events.clear()
            output.samples = [[Ids.of(sample) for sample in group] for group in output.samples]
            if step == count // 3:
                after_warm_up, warm = Resources(), run.ledger.total.total(Fate.TRAINED)
        grown = Resources()
        run.check_books()
        run_blocking(until_idle(GenerateState(run.args).engine))
        total = run.ledger.total
        reasons = total.reasons(Fate.FAILED)
    growth, count = grown.bytes - after_warm_up.bytes, total.total(Fate.TRAINED) - warm
    print(
        f"{policy}: {total.line()}; {growth / count:.0f} bytes a rollout; {time.monotonic() - started:.0f} s"
    )
    assert abandoned_work() == []
    assert growth < HEAP_BYTES + LEAK_BYTES * count
    assert grown.threads <= after_warm_up.threads + 2
    assert grown.sockets <= before.sockets + 2 * SLOTS + 20
    assert grown.files - grown.sockets <= after_warm_up.files - after_warm_up.sockets + 8
    wait_for_closed(before.sockets)
    assert sum(reasons.values()) >= 0.02 * ROLLOUTS
    assert set(reasons) <= {
        "generate: EngineError",
        "generate: DeadlineError",
        "generate: ValueError",
        "reward: ConnectionError",
        "aborted: the sandbox died",
    }


def check_step(run, output, step):
    samples = [sample for group in output.samples for sample in group]
    check_rows(samples)
    rows = to_train_samples(output.samples, run.args)
    assert all(row.votes == (not s.remove_sample) for row, s in zip(rows, samples, strict=True))
    ages = [step - oldest(sample) for sample in samples if not sample.remove_sample]
    if BOUND[run.policy] is not None:
        assert max(ages) <= BOUND[run.policy]
    assert output.metrics["rollout/oldest_token_age"] == max(ages)


def wait_for_closed(sockets):
    """The engine has gone, and so have all connections to it."""
    end = time.monotonic() + 20
    while Resources().sockets > sockets and time.monotonic() < end:
        time.sleep(0.1)
    assert Resources().sockets <= sockets


async def until_idle(engine):
    """Nothing that was given up stays at the engine."""
    for _ in range(1000):
        loads = await engine.loads()
        if not any(load["num_running_reqs"] or load["num_waiting_reqs"] for load in loads):
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"the engine still works: {loads}")


class Ids(NamedTuple):
    """What the books need of a sample, so that the test itself keeps no more."""

    group_index: int
    index: int
    rollout_id: int

    @classmethod
    def of(cls, sample):
        return cls(sample.group_index, sample.index, sample.rollout_id)

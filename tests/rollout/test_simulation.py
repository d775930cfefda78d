"""The real scheduler in virtual time: bounds on age, and decisions that can be made again."""

import asyncio
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.errors import SlimeError
from slime.rollout.accounting import Fate
from slime.rollout.events import read_events
from slime.rollout.policy import FullyAsynchronous, Synchronous
from slime.rollout.replay import replay
from slime.rollout.scheduling import Limits
from slime.rollout.simulation import Setting, simulate
from slime.rollout.virtual_time import run_virtually


def setting(policy, *, bound=None, late=1.0, steps=20, wanted=4, size=2, slots=64, seed=0, alpha=1.5, **more):
    rng = random.Random(seed)
    return Setting(
        policy=policy,
        limits=Limits(wanted=wanted, group_size=size, max_staleness=bound, late_percentile=late),
        slots=slots,
        draw=lambda: rng.paretovariate(alpha),
        steps=steps,
        ahead=more.pop("ahead", policy.continuous),
        **({"train_seconds": 2.0, "update_seconds": 0.1} | more),
    )


def test_time_jumps_over_sleep_and_keeps_its_order():
    seen = []

    async def sleeper(seconds):
        await asyncio.sleep(seconds)
        seen.append((seconds, asyncio.get_running_loop().time()))

    async def main():
        await asyncio.gather(sleeper(5e6), sleeper(1.0), sleeper(2.5))

    run_virtually(main())
    assert [s for s, _ in seen] == [1.0, 2.5, 5e6]
    assert all(abs(at - s) < 1e-6 for s, at in seen)


def test_a_wait_for_what_cannot_happen_is_an_error_and_not_a_hang():
    async def main():
        await asyncio.Event().wait()

    with pytest.raises(SlimeError, match="nothing is left"):
        run_virtually(main())


@settings(max_examples=40, deadline=None)
@given(
    bound=st.integers(1, 5),
    wanted=st.integers(1, 5),
    most=st.integers(1, 30),
    slots=st.integers(1, 40),
    train=st.sampled_from([0.0, 0.5, 10.0]),
    late=st.sampled_from([0.5, 0.98, 1.0]),
    waits=st.booleans(),
    seed=st.integers(0, 99),
)
def test_law_7_no_token_is_older_than_the_bound_and_nothing_is_dropped_for_it(
    bound, wanted, most, slots, train, late, waits, seed
):
    policy = FullyAsynchronous(most, waits=waits)
    found = simulate(
        setting(policy, bound=bound, late=late, wanted=wanted, slots=slots, seed=seed, train_seconds=train)
    )
    assert found.oldest <= bound
    account = found.account
    assert account.total(Fate.TRAINED) == 20 * wanted * 2
    assert account.total(Fate.FILTERED) == account.total(Fate.FAILED) == account.in_flight == 0
    trained = [group for step in found.groups for group in step]
    assert len(trained) == len(set(trained)) == 20 * wanted


def test_a_late_group_that_holds_up_a_batch_is_cut_and_counted():
    policy = FullyAsynchronous(16)
    never = simulate(setting(policy, bound=2, steps=60))
    cuts = simulate(setting(policy, bound=2, steps=60, late=0.9))
    assert never.cut == 0 < cuts.cut < 0.2 * cuts.account.total(Fate.TRAINED)
    assert cuts.seconds < 0.8 * never.seconds


def test_more_slack_waits_less():
    policy = FullyAsynchronous(16)
    seconds = [simulate(setting(policy, bound=bound, steps=60)).seconds for bound in (1, 2, 4)]
    assert seconds[0] > seconds[1] > seconds[2]


def test_partial_rollouts_are_continued_and_not_sampled_again():
    found = simulate(setting(Synchronous(8, partial=True), steps=40))
    fresh = simulate(setting(Synchronous(8), steps=40))
    assert found.account.reasons(Fate.REQUEUED).keys() <= {"continued", "finished"}
    assert found.account.wasted_ratio == 0 < fresh.account.wasted_ratio
    assert fresh.account.reasons(Fate.REQUEUED)["begins again"] > 0


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "policy",
    [
        Synchronous(4),
        Synchronous(7),
        Synchronous(7, partial=True),
        FullyAsynchronous(16),
        FullyAsynchronous(16, waits=True),
    ],
    ids=["synchronous", "surplus", "partial", "fully", "waits"],
)
def test_a_replay_of_the_log_closes_the_same_batches(tmp_path, policy, seed):
    log = tmp_path / "events.jsonl"
    bound = 3 if policy.continuous else None
    found = simulate(setting(policy, bound=bound, late=0.9 if bound else 1.0, seed=seed), log)
    closed = replay(read_events(log))
    assert [batch.recorded for batch in closed] == found.groups
    assert all(batch.same for batch in closed), [batch for batch in closed if not batch.same]


@settings(max_examples=60, deadline=None)
@given(
    bound=st.integers(1, 4),
    wanted=st.integers(1, 5),
    most=st.integers(1, 12),
    slots=st.integers(1, 20),
    train=st.sampled_from([0.5, 3.0, 10.0]),
    waits=st.booleans(),
    judging=st.sampled_from([0.0, 0.3, 2.0]),
    finishing=st.sampled_from([0.0, 4.0]),
    seed=st.integers(0, 99),
)
def test_a_replay_closes_the_same_batches_however_rollouts_overlap_training(
    tmp_path_factory, bound, wanted, most, slots, train, waits, judging, finishing, seed
):
    """Filters and hooks of the full batch take time, in which groups end and nothing is taken or started."""
    log = tmp_path_factory.mktemp("replay") / "events.jsonl"
    policy, rng = FullyAsynchronous(most, waits=waits), random.Random(seed)

    async def judge(group, outstanding, wanted):
        await asyncio.sleep(rng.uniform(0, judging))
        return "dropped" if rng.random() < 0.2 else None

    async def finish(accepted, seen):
        await asyncio.sleep(rng.uniform(0, finishing))

    hooks = {"judge": judge, "finish": finish, "train_seconds": train}
    simulate(setting(policy, bound=bound, wanted=wanted, slots=slots, seed=seed, **hooks), log)
    assert all(batch.same for batch in replay(read_events(log)))


def test_a_replay_finds_a_batch_that_the_scheduler_would_not_have_closed(tmp_path):
    log = tmp_path / "events.jsonl"
    simulate(setting(Synchronous(7)), log)
    events = list(read_events(log))
    close = next(event for event in events if event["event"] == "close" and event["step"] == 3)
    close["groups"][0] += 1000
    assert [batch.step for batch in replay(events) if not batch.same] == [3]

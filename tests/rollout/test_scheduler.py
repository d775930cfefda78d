import asyncio
from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.errors import ConfigError, DataError, RolloutFailedError
from slime.rollout.accounting import Fate
from slime.rollout.inflight import InFlight
from slime.rollout.outcome import Aborted, Rollout
from slime.rollout.policy import FullyAsynchronous, Leftover, Synchronous, View
from slime.rollout.scheduler import Scheduler
from slime.rollout.scheduling import Limits
from slime.rollout.stopping import Stop
from slime.utils.types import Sample
from tests.rollout.kit import ListSource, completed_rollout, failed_rollout, finished, until

HANG = 3600.0
LIMITS = ("max_failed_ratio", "max_staleness", "late_percentile")


class Runs:
    """A stand-in for the runner: `durations` and `failing` by group index say what each group does."""

    def __init__(self, durations=None, failing=None):
        self.durations = durations or {}
        self.failing = failing or {}
        self.started = []

    async def __call__(self, group, step, stop):
        number = group[0].group_index
        self.started.append(number)
        if group[0].reward is None:
            await asyncio.sleep(self.durations.get(number, 0.0))
        broken = self.failing.get(number, 0)
        return [
            failed_rollout(sample) if slot < broken else completed_rollout(sample)
            for slot, sample in enumerate(group)
        ]


def scheduler(source, runs=None, *, wanted=2, over=None, policy=None, judge=None, **options):
    async def ask(*asked):
        return judge(*asked) if judge else None

    return Scheduler(
        source=source,
        run_group=runs or Runs(),
        policy=policy or Synchronous(over or wanted),
        judge=ask,
        limits=Limits(
            wanted=wanted,
            group_size=source.size,
            **{name: options.pop(name) for name in LIMITS if name in options},
        ),
        **({"inflight": InFlight()} | options),
    )


def collect(source, runs=None, *, steps=1, **options):
    """The batches of some steps."""

    async def main():
        async with scheduler(source, runs, **options) as one:
            return [await one.collect(step) for step in range(steps)], one

    return asyncio.run(main())


def groups_of(batch):
    return [run.key[0] for run in batch.groups]


def test_a_batch_has_exactly_the_wanted_groups_in_order():
    source = ListSource(size=3)
    (first, second), one = collect(source, Runs({0: 0.03, 1: 0.01}), wanted=2, steps=2)
    assert groups_of(first) == [0, 1]
    assert groups_of(second) == [2, 3]
    assert first.account.line() == (
        "step 0: 6 submitted = 6 trained + 0 filtered + 0 failed + 0 requeued + 0 in flight"
    )
    assert one.ledger.total.submitted == 12


def test_law_5_surplus_finished_groups_go_back_with_their_rewards_and_are_not_run_again():
    """Groups 0-3 finish together: two are taken, two go back and fill the next step."""
    source, runs = ListSource(), Runs()
    (first, second), one = collect(source, runs, wanted=2, over=4, steps=2)
    assert groups_of(first) == [0, 1]
    assert groups_of(second) == [2, 3]
    assert all(sample.reward == 1.0 for run in second.groups for sample in run.members)
    assert first.account.total(Fate.REQUEUED) == 4
    assert one.ledger.total.in_flight == 0


def test_unfinished_groups_are_aborted_and_their_prompts_go_back_fresh():
    source, runs = ListSource(), Runs({1: HANG})
    (batch,), _ = collect(source, runs, wanted=2, over=3)
    assert groups_of(batch) == [0, 2]
    (returned,) = source.returned
    assert [sample.group_index for sample in returned] == [1, 1]
    assert all(s.status is Sample.Status.PENDING and s.reward is None and not s.tokens for s in returned)
    assert batch.account.total(Fate.REQUEUED) == 2


def test_the_failed_rollouts_of_a_surplus_group_start_afresh():
    source = ListSource(size=3)
    (batch,), _ = collect(source, Runs(failing={2: 1}), wanted=2, over=3)
    (returned,) = source.returned
    assert [sample.status.value for sample in returned] == ["pending", "completed", "completed"]
    assert batch.account.total(Fate.FAILED) == 1
    assert batch.account.total(Fate.REQUEUED) == 2


def test_a_dropped_group_is_replaced_by_one_new_prompt():
    source, runs = ListSource(), Runs()
    (batch,), _ = collect(source, runs, wanted=4, judge=lambda group, *_: drop_two(group))
    assert groups_of(batch) == [0, 2, 3, 5]
    assert len(runs.started) == 6
    assert batch.drops == {"even_ids": 2}
    assert batch.account.reasons(Fate.FILTERED) == {"even_ids": 4}


def drop_two(group):
    return "even_ids" if group[0].group_index in (1, 4) else None


def test_the_filter_hears_what_is_outstanding():
    heard = []

    def judge(group, outstanding, wanted):
        heard.append((outstanding, wanted))

    collect(ListSource(), wanted=2, over=5, judge=judge)
    assert heard == [(5, 2), (5, 2)]


def test_law_4_a_group_keeps_going_with_two_valid_rollouts():
    source = ListSource(size=3)
    (batch,), _ = collect(source, Runs(failing={0: 1}), wanted=2)
    assert groups_of(batch) == [0, 1]
    failed, *valid = batch.groups[0].members
    assert failed.status is Sample.Status.FAILED
    assert failed.reward is None
    assert failed.remove_sample
    assert [sample.reward for sample in valid] == [1.0, 1.0]
    assert batch.account.reasons(Fate.FAILED) == {"generate: ValueError": 1}
    assert batch.account.total(Fate.TRAINED) == 5


def test_law_4_a_group_with_one_valid_rollout_is_dropped_and_replaced():
    source = ListSource(size=3)
    (batch,), _ = collect(source, Runs(failing={0: 2}), wanted=2)
    assert groups_of(batch) == [1, 2]
    assert batch.account.reasons(Fate.FAILED) == {"generate: ValueError": 2}
    assert batch.account.reasons(Fate.FILTERED) == {"too_few_valid": 1}


def test_too_many_failures_stop_the_step_with_reasons_and_an_example():
    source = ListSource(size=4)
    with pytest.raises(RolloutFailedError) as caught:
        collect(source, Runs(failing=dict.fromkeys(range(100), 3)), wanted=2)
    assert "6 of 8 finished rollouts failed" in str(caught.value)
    assert "6 x generate: ValueError, e.g. rollout 0 in hook: it broke" in str(caught.value)


def test_early_failures_do_not_count_against_rollouts_that_still_run():
    """The first two groups fail at once, all others take longer: 4 of 16 is below the bound."""
    source = ListSource(size=2)
    slow = dict.fromkeys(range(2, 20), 0.02)
    (batch,), _ = collect(source, Runs(slow, {0: 2, 1: 2}), wanted=8)
    assert len(batch.groups) == 8


def test_filtering_without_end_ends_with_the_counts_by_reason():
    source = ListSource()
    with pytest.raises(RolloutFailedError, match=r"128 prompts gave only 0 of 2 groups.*boring 128"):
        collect(source, wanted=2, judge=lambda *_: "boring")


def test_surplus_that_still_runs_does_not_count_as_drawn_in_vain():
    """200 groups run for one that is wanted; the first is dropped, the second taken."""
    slow = dict.fromkeys(range(2, 300), HANG) | {1: 0.05}
    (batch,), _ = collect(ListSource(size=1), Runs(slow), wanted=1, over=200, judge=drop_first)
    assert groups_of(batch) == [1]


def drop_first(group, *_):
    return "first" if group[0].group_index == 0 else None


class NoBuffer(ListSource):
    def add_samples(self, groups):
        raise DataError("cannot take groups back")


def test_an_error_is_not_hidden_by_a_source_that_takes_nothing_back():
    async def run_group(group, step, stop):
        if group[0].group_index == 1:
            raise ConfigError("no reward is configured")
        await asyncio.sleep(HANG)

    async def main():
        async with scheduler(NoBuffer(), run_group, wanted=3) as one:
            await one.collect(0)

    with pytest.raises(ConfigError, match="no reward") as caught:
        asyncio.run(main())
    assert "cannot take groups back" in "".join(caught.value.__notes__)


def test_law_5_the_group_that_a_filter_breaks_on_goes_back_too():
    source = ListSource()

    def breaks(*_):
        raise ConfigError("broken")

    async def main():
        async with scheduler(source, wanted=2, judge=breaks) as one:
            with pytest.raises(ConfigError):
                await one.collect(0)
        one.ledger.check(0)

    asyncio.run(main())
    assert sorted(group[0].group_index for group in source.returned) == [0, 1]


def test_a_source_that_runs_dry_is_an_error():
    with pytest.raises(DataError, match="no more prompts: 1 of 2 groups"):
        collect(ListSource(prompts=1), wanted=2)


def test_an_error_of_the_run_reaches_the_caller_and_everything_goes_back():
    source = ListSource()

    async def run_group(group, step, stop):
        if group[0].group_index == 1:
            raise ConfigError("no reward is configured")
        await asyncio.sleep(HANG)

    async def main():
        async with scheduler(source, run_group, wanted=3) as one:
            with pytest.raises(ConfigError, match="no reward"):
                await one.collect(0)
            return one

    one = asyncio.run(main())
    assert sorted(group[0].group_index for group in source.returned) == [0, 1, 2]
    assert one.ledger.total.total(Fate.REQUEUED) == 6
    one.ledger.check(0)


def test_a_cancelled_step_leaves_no_task_and_loses_nothing():
    async def main():
        source = ListSource()
        async with scheduler(source, Runs({1: HANG}), wanted=2) as one:
            task = asyncio.create_task(one.collect(0))
            await asyncio.sleep(0.05)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert len(asyncio.all_tasks()) == 1
        return source, one

    source, one = asyncio.run(main())
    one.ledger.check(0)
    by_group = {group[0].group_index: group for group in source.returned}
    assert sorted(by_group) == [0, 1]
    assert by_group[0][0].reward == 1.0
    assert by_group[1][0].reward is None


def test_law_2_groups_without_ids_get_unique_ones():
    def strip(sample):
        sample.group_index = sample.index = sample.rollout_id = None

    (batch,), _ = collect(ListSource(prepare=strip), wanted=3)
    samples = [sample for run in batch.groups for sample in run.members]
    assert len({sample.index for sample in samples}) == 6
    assert sorted(Counter(sample.group_index for sample in samples).values()) == [2, 2, 2]


def test_law_2_filled_ids_are_unique_over_steps_of_their_own_schedulers():
    """The surplus of the first step, which goes back with its ids, fills half of the second."""

    def strip(sample):
        sample.group_index = sample.index = sample.rollout_id = None

    source = ListSource(prepare=strip)
    batches = [collect(source, wanted=2, over=3)[0][0] for _ in range(3)]
    samples = [sample for batch in batches for run in batch.groups for sample in run.members]
    assert len({sample.index for sample in samples}) == 12
    assert sorted(Counter(sample.group_index for sample in samples).values()) == [2] * 6


def test_what_a_filter_removes_from_the_full_batch_counts_as_filtered():
    async def finish(accepted, seen):
        for sample in accepted[0].members:
            sample.remove_sample = True

    (batch,), _ = collect(ListSource(), wanted=2, finish=finish)
    assert batch.account.reasons(Fate.FILTERED) == {"remove_sample": 2}
    assert batch.account.total(Fate.TRAINED) == 2


def account_of(durations, drops, failing, steps=3):
    """Everything that steps of the ordered policy decide, and what they leave behind; or why they ended."""
    heard = []

    def judge(group, outstanding, wanted):
        heard.append((group[0].group_index, outstanding))
        return "dropped" if group[0].group_index in drops else None

    source = ListSource(size=3)
    policy = Synchronous(4, ordered=True)
    runs = Runs(durations, failing)
    try:
        batches, _ = collect(source, runs, wanted=2, policy=policy, judge=judge, steps=steps)
    except RolloutFailedError as error:
        return heard, str(error)
    left = [
        (sample.group_index, sample.status, sample.reward) for group in source.returned for sample in group
    ]
    return [groups_of(batch) for batch in batches], [batch.account for batch in batches], heard, left


@settings(max_examples=25, deadline=None)
@given(
    durations=st.dictionaries(st.integers(0, 12), st.sampled_from([0.001, 0.002, 0.004]), max_size=12),
    drops=st.sets(st.integers(0, 8), max_size=4),
    failing=st.dictionaries(st.integers(0, 8), st.integers(1, 2), max_size=3),
)
def test_the_ordered_policy_decides_the_same_whatever_finishes_first(durations, drops, failing):
    options = {"drops": drops, "failing": failing}
    assert account_of(durations, **options) == account_of({}, **options)


def test_the_ordered_policy_gives_back_finished_groups_fresh_and_in_order():
    """Group 2 has finished when the batch closes and group 3 has not; both start anew in the next step."""
    source, runs = ListSource(), Runs({1: 0.03, 3: HANG})
    (batch,), _ = collect(source, runs, wanted=2, policy=Synchronous(4, ordered=True))
    assert groups_of(batch) == [0, 1]
    assert [[sample.group_index for sample in group] for group in source.returned] == [[2, 2], [3, 3]]
    assert all(sample.reward is None for group in source.returned for sample in group)
    assert batch.account.total(Fate.REQUEUED) == 4


@dataclass
class Ahead:
    """A policy that lets work run on over the close of a batch."""

    outstanding: int
    leftover: Leftover
    ordered: bool = False
    continuous: bool = False

    def admit(self, view):
        return self.outstanding - view.running

    def is_full(self, view):
        return view.accepted >= view.wanted

    def at_close(self, view):
        return self.leftover

    def at_update(self, view):
        return self.leftover


@pytest.mark.parametrize("leftover", [Leftover.KEEP, Leftover.WAIT])
def test_a_policy_can_keep_work_over_the_close_of_a_batch(leftover):
    source, runs = ListSource(), Runs({1: 0.02, 3: 0.02})

    async def main():
        async with scheduler(source, runs, wanted=2, policy=Ahead(4, leftover)) as one:
            first = await one.collect(0)
            carried = first.account.in_flight
            await one.before_update()
            second = await one.collect(1)
            return carried, second

    carried, second = asyncio.run(main())
    assert carried > 0
    assert second.account.carried == carried
    assert len(second.groups) == 2
    assert len(set(runs.started)) == len(runs.started)


@pytest.mark.parametrize("breaks", ["source", "group"])
def test_what_breaks_between_batches_does_not_keep_an_update_waiting_and_ends_the_next_batch(breaks):
    """Group 2 frees a place between the batches; the source then fails, or group 3 does."""
    source, broken, updated = ListSource(size=1), [], []
    give = source.get_samples

    def fail():
        broken.append(True)
        raise ConnectionError("database gone")

    async def run_group(group, step, stop):
        number = group[0].group_index
        await asyncio.sleep({2: 0.02, 3: 0.04, 4: 0.1}.get(number, 0.0))
        if number == 3 and breaks == "group":
            fail()
        return [completed_rollout(group[0])]

    async def main():
        if breaks == "source":
            source.get_samples = lambda count: fail() if source.given >= 4 else give(count)
        policy = FullyAsynchronous(2, waits=True)
        async with scheduler(source, run_group, wanted=2, policy=policy) as one:
            assert groups_of(await one.collect(0)) == [0, 1]
            await until(lambda: broken)
            await asyncio.wait_for(one.before_update(), 5)
            one.weights_changed(1)
            updated.append(1)
            await one.collect(1)

    with pytest.raises(ConnectionError, match="database gone"):
        asyncio.run(main())
    assert updated
    assert {2, 3} <= {group[0].group_index for group in source.returned}


def test_the_synchronous_policy_refills_by_what_is_missing():
    policy = Synchronous(6)
    assert policy.admit(View(wanted=4, accepted=0, running=0)) == 6
    assert policy.admit(View(wanted=4, accepted=1, running=5)) == 0
    assert policy.admit(View(wanted=4, accepted=1, running=4)) == 1
    assert not policy.is_full(View(wanted=4, accepted=3, running=9))


@settings(max_examples=40, deadline=None)
@given(
    failing=st.dictionaries(st.integers(0, 30), st.integers(0, 3)),
    delays=st.dictionaries(st.integers(0, 30), st.sampled_from([0.0, 0.001, 0.003])),
    dropped=st.sets(st.integers(0, 30)),
    over=st.integers(2, 6),
)
def test_law_5_no_prompt_is_lost_or_trained_twice(failing, delays, dropped, over):
    """Over three steps, every prompt drawn is in exactly one batch, dropped once, or back at the source."""
    source, runs = ListSource(size=3), Runs(delays, failing)
    batches, one = collect(
        source,
        runs,
        wanted=2,
        over=over,
        steps=3,
        max_failed_ratio=1.0,
        judge=lambda group, *_: "drop" if group[0].group_index in dropped else None,
    )
    trained = [number for batch in batches for number in groups_of(batch)]
    filtered = [run.key[0] for b in batches for run in b.seen if run.key[0] not in groups_of(b)]
    back = [group[0].group_index for group in source.returned]
    assert sorted(trained + filtered + back) == list(range(source.given))
    one.ledger.check(0)


def test_a_finished_group_in_the_source_is_taken_as_it_is():
    source = ListSource(prepare=lambda sample: finished(sample, reward=0.5))
    (batch,), _ = collect(source, Runs(dict.fromkeys(range(9), HANG)), wanted=1)
    assert len(batch.groups) == 1


def test_a_group_that_was_cut_before_it_had_tokens_begins_again_and_keeps_what_finished():
    source, tries = ListSource(size=2), Counter()

    async def run_group(group, step, stop):
        number = group[0].group_index
        tries[number] += 1
        rollouts = [completed_rollout(sample) for sample in group]
        if number == 0 and tries[0] == 1:
            stop.reason = Stop.CUT
            aborted = Rollout(
                group_index=0, rollout_id=1, samples=(group[1],), fan_out=False, outcome=Aborted("stopped")
            )
            aborted.void_unless_valid()
            rollouts[1] = aborted
        return rollouts

    (batch,), one = collect(source, run_group, wanted=2)
    assert groups_of(batch) == [0, 1] and tries[0] == 2
    assert one.ledger.total.reasons(Fate.REQUEUED) == {"finished": 1, "begins again": 1}
    assert one.ledger.total.total(Fate.TRAINED) == 4

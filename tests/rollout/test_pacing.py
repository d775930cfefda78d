import heapq
import math
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.rollout.pacing import UNBOUNDED, Pacing, late_after


@dataclass
class Group:
    """One that is out: since which version, and when it is done."""

    version: int
    due: int
    done_at: float


class Simulation:
    """Admission by `room`, batches by `may_take`; training takes `training` seconds a step.

    With `overlaps` groups also start while a step trains, under the weights before it.
    """

    def __init__(self, pacing, durations, *, most_running, training, overlaps):
        self.pacing, self.durations = pacing, iter(durations)
        self.most_running, self.training, self.overlaps = most_running, training, overlaps
        self.now, self.step, self.version = 0.0, 0, 0
        self.running, self.finished, self.batch = [], [], []
        self.taken = []

    def run(self, steps):
        for self.step in range(steps):
            self.batch = []
            self.fill()
            self.taken += [(self.step, group) for group in self.batch]
            self.train()

    def fill(self):
        while len(self.batch) < self.pacing.wanted:
            if not self.take():
                self.admit()
                assert self.running, "nothing runs, nothing may start, nothing may be taken: a deadlock"
                self.wait_for_one()

    def take(self):
        accepted = [group.due for group in self.batch]
        out = [group.due for group in (*self.running, *self.finished)]
        for group in sorted(self.finished, key=lambda group: group.due):
            if self.pacing.may_take(self.step, group.due, accepted, out):
                self.finished.remove(group)
                self.batch.append(group)
                return True
        return False

    def admit(self):
        due = self.pacing.due(self.version)
        while len(self.running) < self.most_running and self.pacing.room(self.step, due, self.dues()) > 0:
            self.running.append(Group(self.version, due, self.now + next(self.durations)))

    def dues(self):
        return [group.due for group in (*self.batch, *self.running, *self.finished)]

    def wait_for_one(self):
        done = min(self.running, key=lambda group: group.done_at)
        self.running.remove(done)
        self.now = max(self.now, done.done_at)
        self.finished.append(done)

    def train(self):
        """The next step's groups may start meanwhile; then the weights change."""
        until, self.batch = self.now + self.training, []
        if self.overlaps:
            self.step += 1
            self.admit()
        while self.running and min(group.done_at for group in self.running) <= until:
            self.wait_for_one()
            if self.overlaps:
                self.admit()
        self.now = until
        self.version += 1


tails = st.floats(0.01, 1.0).map(lambda draw: draw**-2)
"""Durations from 1 to 10,000."""


@settings(max_examples=150, deadline=None)
@given(
    wanted=st.integers(1, 6),
    bound=st.integers(0, 5),
    most_running=st.integers(1, 40),
    training=st.sampled_from([0.0, 1.0, 50.0]),
    overlaps=st.booleans(),
    durations=st.lists(tails, min_size=1, max_size=60),
)
def test_no_group_is_needed_past_its_due_step_and_nothing_deadlocks(
    wanted, bound, most_running, training, overlaps, durations
):
    """All that starts trains, none of it older than the bound, and nothing is ever dropped for it."""
    steps, bound = 12, max(bound, int(overlaps))
    endless = (durations[number % len(durations)] for number in range(10**6))
    run = Simulation(
        Pacing(wanted=wanted, max_staleness=bound),
        endless,
        most_running=most_running,
        training=training,
        overlaps=overlaps,
    )
    run.run(steps)
    assert len(run.taken) == steps * wanted
    for step, group in run.taken:
        assert step <= group.due
        assert step - group.version <= bound
    left = sorted(group.due for group in (*run.running, *run.finished))
    for place, due in enumerate(left):
        assert steps + place // wanted <= due, "a group that is out has no place before it is due"


@settings(max_examples=50, deadline=None)
@given(wanted=st.integers(1, 6), most_running=st.integers(1, 40), durations=st.lists(tails, min_size=9))
def test_a_bound_of_zero_is_strictly_on_policy(wanted, most_running, durations):
    endless = (durations[number % len(durations)] for number in range(10**6))
    run = Simulation(
        Pacing(wanted=wanted, max_staleness=0),
        endless,
        most_running=most_running,
        training=1.0,
        overlaps=False,
    )
    run.run(8)
    assert all(step == group.version for step, group in run.taken)
    assert run.running == run.finished == []


@settings(max_examples=100, deadline=None)
@given(
    wanted=st.integers(1, 5),
    bound=st.integers(0, 4),
    step=st.integers(0, 5),
    offsets=st.lists(st.integers(0, 4), max_size=25),
)
def test_room_is_what_can_still_be_taken_by_its_due_step(wanted, bound, step, offsets):
    """Against the earliest deadline first, done by hand."""
    pacing, dues = Pacing(wanted=wanted, max_staleness=bound), []
    for offset in offsets:
        if pacing.room(step, step + offset, dues) > 0:
            dues.append(step + offset)
    assert feasible(wanted, step, dues)
    for offset in range(5):
        room = pacing.room(step, step + offset, dues)
        assert feasible(wanted, step, dues + [step + offset] * room)
        assert not feasible(wanted, step, dues + [step + offset] * (room + 1))


def feasible(wanted, step, dues):
    heap = list(dues)
    heapq.heapify(heap)
    while heap:
        batch = [heapq.heappop(heap) for _ in range(min(wanted, len(heap)))]
        if batch[0] < step:
            return False
        step += 1
    return True


def test_a_batch_keeps_places_for_what_is_due_before():
    pacing = Pacing(wanted=2, max_staleness=1)
    assert pacing.may_take(3, 4, accepted=[], out=[4, 3])
    assert not pacing.may_take(3, 4, accepted=[4], out=[4, 3])
    assert pacing.may_take(3, 3, accepted=[4], out=[4, 3])


def test_without_a_bound_there_is_always_room():
    pacing = Pacing(wanted=1, max_staleness=None)
    assert pacing.due(7) == pacing.room(3, 9, [1, 1, 1]) == UNBOUNDED
    assert pacing.may_take(3, 9, [9], [1, 1])


@pytest.mark.parametrize(("elapsed", "late"), [(15.0, False), (16.5, False), (17.5, True)])
def test_late_is_longer_than_the_percentile_of_enough_others(elapsed, late):
    durations = [float(second) for second in range(1, 21)]
    assert (elapsed > late_after(durations, 0.8)) is late
    assert late_after(durations[:15], 0.8) == math.inf
    assert late_after(durations, 1.0) == math.inf

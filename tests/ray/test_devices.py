"""Who holds the devices: the order of calls, and steps out of turn."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime.ray.devices import CACHE, WEIGHTS, DeviceTurns, Holder, OutOfTurnError

LEGAL = {
    (Holder.ROLLOUT, "hold"): Holder.NOBODY,
    (Holder.NOBODY, "trainer_is_loaded"): Holder.TRAINING,
    (Holder.NOBODY, "begin_training"): Holder.TRAINING,
    (Holder.TRAINING, "end_training"): Holder.NOBODY,
    (Holder.NOBODY, "begin_update"): Holder.UPDATE,
    (Holder.UPDATE, "begin_rollout"): Holder.ROLLOUT,
}
STEPS = sorted({step for _, step in LEGAL})
A_STEP = ("hold", "begin_training", "end_training", "begin_update", "begin_rollout")


class Both:
    """Engines and trainer that write down what they are told, and what each of them holds."""

    def __init__(self):
        self.calls = []
        self.memory = {*WEIGHTS, *CACHE}
        self.awake = False
        self.fails = None

    def _told(self, name):
        if name == self.fails:
            raise OSError(f"{name} failed")
        self.calls.append(name)

    def pause(self):
        self._told("pause")

    def go_on(self):
        self._told("go_on")

    def release_memory(self, tags):
        assert set(tags) <= self.memory
        self._told("release")
        self.memory -= set(tags)

    def resume_memory(self, tags):
        assert not set(tags) & self.memory
        self._told(f"resume {' '.join(tags)}")
        self.memory |= set(tags)

    def wake(self):
        assert not self.awake
        self._told("wake")
        self.awake = True

    def sleep(self):
        self._told("sleep")
        self.awake = False


def turns(both, rollout=True, train=True):
    return DeviceTurns(both, both, offload_rollout=rollout, offload_train=train)


def test_a_step_frees_before_it_takes_and_takes_weights_before_the_cache():
    both = Both()
    one = turns(both)
    for step in A_STEP:
        getattr(one, step)()
    assert both.calls == [
        *("pause", "release", "wake", "sleep"),
        *("resume weights", "resume kv_cache cuda_graph", "go_on"),
    ]
    assert one.holder is Holder.ROLLOUT and both.memory == {*WEIGHTS, *CACHE}


@pytest.mark.parametrize(
    ("rollout", "train", "calls"),
    [
        (False, False, ["pause", "go_on"]),
        (False, True, ["pause", "wake", "sleep", "go_on"]),
        (True, False, ["pause", "release", "resume weights", "resume kv_cache cuda_graph", "go_on"]),
    ],
)
def test_who_does_not_offload_is_paused_and_keeps_its_memory(rollout, train, calls):
    both = Both()
    one = turns(both, rollout, train)
    for step in A_STEP:
        getattr(one, step)()
    assert both.calls == calls


def test_a_trainer_is_loaded_while_engines_are_down_and_sleeps_before_they_take_weights():
    both = Both()
    one = turns(both)
    one.hold()
    one.trainer_is_loaded()
    with pytest.raises(OutOfTurnError):
        one.begin_update()
    one.end_training()
    one.begin_update()
    assert both.calls == ["pause", "release", "sleep", "resume weights"]


@given(st.lists(st.sampled_from(STEPS), max_size=30), st.booleans(), st.booleans())
def test_what_is_out_of_turn_raises_and_calls_nothing(steps, rollout, train):
    both = Both()
    one = turns(both, rollout, train)
    for step in steps:
        before, calls = one.holder, list(both.calls)
        if (before, step) in LEGAL:
            getattr(one, step)()
            assert one.holder is LEGAL[before, step]
        else:
            with pytest.raises(OutOfTurnError, match=step):
                getattr(one, step)()
            assert (one.holder, both.calls) == (before, calls)
        if rollout and train:
            assert not (both.awake and both.memory)


def test_after_a_step_that_failed_nothing_is_in_turn():
    for step, failing in itertools.product(A_STEP, ("pause", "wake", "sleep", "resume weights", "go_on")):
        both = Both()
        one = turns(both)
        both.fails = failing
        try:
            for name in A_STEP:
                getattr(one, name)()
        except OSError:
            assert one.holder is Holder.UNKNOWN
        with pytest.raises(OutOfTurnError, match="a step between two states failed"):
            getattr(one, step)()

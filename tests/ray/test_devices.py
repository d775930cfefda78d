"""Who holds the devices: what leads on from where, and steps out of turn."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime.ray.devices import DeviceTurns, Holder, OutOfTurnError

STEPS = ("hold", "training", "update")
LEGAL = {
    (Holder.ROLLOUT, "hold"): Holder.NOBODY,
    (Holder.NOBODY, "training"): Holder.NOBODY,
    (Holder.NOBODY, "update"): Holder.ROLLOUT,
    (Holder.ROLLOUT, "update"): Holder.ROLLOUT,
}
OVERLAPPING = LEGAL | {(Holder.ROLLOUT, "training"): Holder.ROLLOUT}


def test_a_step_of_training_holds_trains_and_updates():
    turns = DeviceTurns(generates=True)
    with turns.update() as held:
        assert not held
    with turns.hold():
        pass
    with turns.training():
        assert turns.holder is Holder.TRAINING
    with turns.update() as held:
        assert held
    assert turns.holder is Holder.ROLLOUT


def test_without_engines_the_trainer_trains_and_nothing_is_held():
    turns = DeviceTurns(generates=False)
    with turns.training():
        assert turns.holder is Holder.TRAINING
    with pytest.raises(OutOfTurnError), turns.hold():
        pass


@given(st.lists(st.sampled_from(STEPS), max_size=30), st.booleans(), st.booleans())
def test_what_is_out_of_turn_raises_before_anything_is_done(steps, generates, overlaps):
    turns, legal = DeviceTurns(generates=generates, overlaps=overlaps), OVERLAPPING if overlaps else LEGAL
    for step in steps:
        before, done = turns.holder, False
        if (before, step) in legal:
            with getattr(turns, step)():
                done = True
            assert turns.holder is legal[before, step] and done
        else:
            with pytest.raises(OutOfTurnError, match=f"{step} of the devices"), getattr(turns, step)():
                done = True
            assert turns.holder is before and not done


@given(st.lists(st.sampled_from(STEPS), max_size=10), st.sampled_from(STEPS), st.booleans())
def test_engines_and_trainer_are_never_both_awake_where_they_take_turns(steps, inside, overlaps):
    turns = DeviceTurns(generates=True, overlaps=overlaps)
    for step in steps:
        try:
            with getattr(turns, step)():
                if step == "training" and not overlaps:
                    with pytest.raises(OutOfTurnError), getattr(turns, inside)():
                        pass
                assert turns.holder is not Holder.BOTH or overlaps
        except OutOfTurnError:
            continue


@pytest.mark.parametrize("failing", STEPS)
def test_after_a_step_that_failed_nothing_is_in_turn(failing):
    turns = DeviceTurns(generates=failing != "training")
    with pytest.raises(OSError, match="broken"), getattr(turns, failing)():
        raise OSError("broken")
    for step in STEPS:
        with pytest.raises(OutOfTurnError, match="a step between two states failed"), getattr(turns, step)():
            pass

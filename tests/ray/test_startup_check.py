"""Law 7: the behaviour policy is known; engine and trainer must agree on it before anything trains."""

import pytest

from slime.errors import MismatchError
from slime.ray.startup_check import check_log_probs
from slime.train.batch import TrainSample


def sample(log_probs):
    return TrainSample(
        index=4,
        rollout_id=4,
        group_index=0,
        tokens=(1, 2, *range(len(log_probs))),
        response_length=len(log_probs),
        loss_mask=(1,) * len(log_probs),
        rollout_log_probs=tuple(log_probs),
        reward=0.0,
    )


def test_equal_log_probs_pass_and_the_gap_is_told():
    text = check_log_probs([sample([-1.0, -2.0])], [[-1.00001, -2.0]], {"float32"})
    assert "2 tokens" in text and "max 1.0e-05" in text


def test_a_gap_in_float32_stops_with_the_place():
    with pytest.raises(MismatchError, match="response token 1 of probe 4"):
        check_log_probs([sample([-1.0, -2.0])], [[-1.0, -2.5]], {"float32"})


def test_a_gap_in_bfloat16_warns_and_suggests_a_correction():
    text = check_log_probs([sample([-1.0])], [[-1.04]], {"float32", "bfloat16"})
    assert text.startswith("warning") and "--use-tis" in text


def test_no_token_is_not_agreement():
    with pytest.raises(MismatchError, match="no token"):
        check_log_probs([], [], {"float32"})

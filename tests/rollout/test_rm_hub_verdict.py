import asyncio
import pickle
import types

import pytest

from slime.errors import DeadlineError, HookError, RewardError
from slime.rollout.outcome import Failed as FailedRollout
from slime.rollout.rewarding import INVALID_KEY, Rewarder
from slime.rollout.rm_hub.pool import close_shared_pools
from slime.rollout.rm_hub.verdict import Failed, Invalid, Tally, Valid, failure_kind
from slime.utils.types import Sample
from tests.rollout.test_hooks import HERE


@pytest.fixture(scope="module", autouse=True)
def no_process_left():
    yield
    close_shared_pools()


def rewarded(samples, *, together=False, evaluation=False, **args):
    """Reward samples; gives the error if there is one, and the counts."""
    tally = Tally()
    rewarder = Rewarder(types.SimpleNamespace(**args), grace=0.2, tally=tally)
    work = rewarder.reward_together(samples, "group 0", evaluation) if together else None
    try:
        asyncio.run(work or rewarder.reward(samples, evaluation))
    except (RewardError, HookError, DeadlineError) as error:
        return error, tally.take()
    return None, tally.take()


def test_every_verdict_is_counted_with_its_reason():
    tally = Tally()
    for verdict in (
        Valid(1.0),
        Valid(0.0),
        Invalid(0.0, "no_box"),
        Failed(RewardError("x", reason="timeout")),
    ):
        tally.record(verdict)
    prefix = "rollout/reward/"
    assert tally.take() == {
        prefix + "valid": 2.0,
        prefix + "invalid": 1.0,
        prefix + "failed": 1.0,
        prefix + "invalid/no_box": 1.0,
        prefix + "failed/timeout": 1.0,
    }
    assert tally.take() == {}


def test_a_sample_without_an_answer_scores_zero_is_marked_and_counted():
    samples = [Sample(response="4", label="4"), Sample(response=r"\boxed{4}", label="4")]
    error, counts = rewarded(samples, rm_type="math")
    assert error is None
    assert [sample.reward for sample in samples] == [0.0, 1.0]
    assert samples[0].metadata[INVALID_KEY] == "no_box"
    assert INVALID_KEY not in samples[1].metadata
    assert counts["rollout/reward/invalid/no_box"] == counts["rollout/reward/valid"] == 1.0


def test_evaluation_is_not_counted():
    assert rewarded([Sample(response="4", label="4")], rm_type="math", evaluation=True) == (None, {})


@pytest.mark.parametrize("together", [False, True])
def test_a_failed_verdict_ends_the_rollout_and_is_counted(together):
    args = {
        "custom_rm_path": HERE + ("reward_group_short" if together else "reward_raises"),
        "group_rm": together,
    }
    samples = [Sample(index=0), Sample(index=1)]
    error, counts = rewarded(samples, together=together, **args)
    assert isinstance(error, RewardError)
    assert counts["rollout/reward/failed"] == 2.0
    assert counts["rollout/reward/valid"] == 0.0
    assert [sample.reward for sample in samples] == [None, None]


def test_a_hook_that_ignores_its_deadline_and_cancellation_is_counted():
    error, counts = rewarded(
        [Sample()], custom_rm_path="tests.rollout.test_rm_hub_verdict.deaf", reward_timeout=0.1
    )
    assert error is None or isinstance(error, RewardError | HookError | DeadlineError)
    assert sum(counts[f"rollout/reward/{kind}"] for kind in ("valid", "invalid", "failed")) == 1.0


async def deaf(args, sample, **kwargs):
    for _ in range(3):
        try:
            await asyncio.sleep(0.3)
        except asyncio.CancelledError:
            continue
    return 1.0


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (RewardError("x", reason="timeout"), "timeout"),
        (RewardError("x"), "RewardError"),
        (HookError("x"), "HookError"),
        (ValueError("x"), "ValueError"),
    ],
)
def test_failures_count_under_few_names(error, kind):
    assert failure_kind(error) == kind
    assert Failed(error).reason == kind


def test_the_reason_of_an_error_survives_another_process():
    error = pickle.loads(pickle.dumps(RewardError("x", place="p", remedy="r", reason="timeout")))
    assert (error.message, error.place, error.remedy, error.reason) == ("x", "p", "r", "timeout")
    assert FailedRollout("reward: timeout", "p", "d").reason.endswith(failure_kind(error))

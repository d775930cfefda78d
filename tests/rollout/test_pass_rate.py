from types import SimpleNamespace

import pytest

from slime.errors import RewardError
from slime.rollout.filter_hub.pass_rate import PassRates, check_pass_rate, record_pass_rates
from slime.utils.types import Sample


@pytest.fixture(autouse=True)
def fresh_rates():
    PassRates.clear_instance()
    yield
    PassRates.clear_instance()


def args(**values):
    return SimpleNamespace(**({"reward_key": None, "pass_rate_low": 0.2, "pass_rate_high": 0.8} | values))


def group(*rewards, index=0):
    return [Sample(group_index=index, rollout_id=n, reward=reward) for n, reward in enumerate(rewards)]


@pytest.mark.parametrize(
    "rewards, keep, reason",
    [
        ((1.0, 0.0), True, None),
        ((0.0, 0.0), False, "pass_rate_low"),
        ((1.0, 1.0), False, "pass_rate_high"),
        ((1.0, 1.0, 1.0, 1.0, 0.0), True, None),
        ((None,), False, "no_reward"),
    ],
)
def test_groups_outside_of_the_bounds_are_dropped_by_reason(rewards, keep, reason):
    verdict = check_pass_rate(args(), group(*rewards))
    assert (verdict.keep, verdict.reason) == (keep, reason)


def test_siblings_have_one_vote():
    fan_out = [[Sample(group_index=0, rollout_id=0, reward=1.0)] * 3, *group(0.0, 0.0)[1:]]
    PassRates().expect(0, "p")
    check_pass_rate(args(), fan_out)
    assert PassRates().rate("p") == 0.5


def test_law_4_failures_do_not_vote():
    PassRates().expect(0, "p")
    rows = group(1.0, 0.0, 0.0)
    rows[2].status = Sample.Status.FAILED
    check_pass_rate(args(), rows)
    assert PassRates().rate("p") == 0.5


def test_rates_run_over_the_last_groups_of_a_prompt_and_count_each_group_once():
    rates = PassRates()
    for index, rewards in enumerate([(1.0, 1.0), (0.0, 0.0), (1.0, 0.0)]):
        rates.expect(index, "p")
        record_pass_rates(args(pass_rate_window=2), [group(*rewards, index=index)], None)
        record_pass_rates(args(pass_rate_window=2), [group(*rewards, index=index)], None)
    assert rates.rate("p") == 0.25
    assert rates.rate("q") is None


def test_groups_that_nobody_awaits_are_filtered_and_not_recorded():
    assert check_pass_rate(args(), group(1.0, 0.0)).keep
    assert PassRates().counts(0.0, 1.0) == {}


def test_rewards_between_0_and_1_need_a_threshold():
    with pytest.raises(RewardError, match="--pass-threshold"):
        check_pass_rate(args(), group(0.5, 1.0))
    assert check_pass_rate(args(pass_threshold=0.6), group(0.5, 1.0)).keep

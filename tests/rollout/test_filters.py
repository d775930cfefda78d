import types

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime.errors import HookError
from slime.rollout.filter_hub.base_types import (
    DynamicFilterOutput,
    call_dynamic_filter,
    should_drop_dynamic_filter_output,
)
from slime.rollout.filter_hub.dynamic_sampling_filters import (
    check_reward_nonzero_std,
    check_reward_nonzero_std_with_fallback,
)
from slime.rollout.groups import flatten, rollouts_of
from slime.utils.types import Sample

ARGS = types.SimpleNamespace(reward_key=None)


def group_of(*rewards):
    return [Sample(rollout_id=n, index=n, reward=reward) for n, reward in enumerate(rewards)]


@pytest.mark.parametrize("rewards, keep", [((0.0, 1.0), True), ((1.0, 1.0), False), ((0.5,), False)])
def test_group_is_kept_iff_rewards_differ(rewards, keep):
    assert check_reward_nonzero_std(ARGS, group_of(*rewards)).keep is keep


def test_rewards_are_compared_exactly():
    assert check_reward_nonzero_std(ARGS, group_of(0.1 + 0.2, 0.3)).keep
    assert not check_reward_nonzero_std(ARGS, group_of(0.1, 0.1, 0.1)).keep


def test_reason_names_the_common_reward():
    assert check_reward_nonzero_std(ARGS, group_of(1.0, 1.0)).reason == "zero_std_1.0"


@pytest.mark.parametrize("nested", [True, False])
def test_siblings_have_one_vote(nested):
    split = [Sample(rollout_id=0, reward=0.5), Sample(rollout_id=0, reward=1.5)]
    other = Sample(rollout_id=1, reward=1.0)
    group = [split, [other]] if nested else [*split, other]
    assert not check_reward_nonzero_std(ARGS, group).keep
    other.reward = 0.5
    assert check_reward_nonzero_std(ARGS, group).keep


@given(st.permutations(range(6)), st.lists(st.sampled_from([0.0, 1.0]), min_size=3, max_size=3))
def test_verdict_does_not_depend_on_order_or_cut(order, rewards):
    rows = [Sample(rollout_id=n // 2, reward=rewards[n // 2]) for n in range(6)]
    verdict = check_reward_nonzero_std(ARGS, [rows[n] for n in order])
    assert verdict == check_reward_nonzero_std(ARGS, [[rows[2 * n], rows[2 * n + 1]] for n in range(3)])
    assert verdict.keep == (len(set(rewards)) > 1)


@pytest.mark.parametrize("status", [Sample.Status.FAILED, Sample.Status.ABORTED])
def test_failure_does_not_vote(status):
    group = group_of(1.0, 1.0, 0.0)
    group[2].status = status
    assert not check_reward_nonzero_std(ARGS, group).keep
    group[2].status, group[2].reward = Sample.Status.COMPLETED, None
    assert check_reward_nonzero_std(ARGS, group).reason == "zero_std_1.0"
    for sample in group:
        sample.reward = None
    assert check_reward_nonzero_std(ARGS, group).reason == "no_reward"


def test_dict_rewards_are_read_by_their_key():
    group = [Sample(rollout_id=n, reward={"acc": float(n), "score": 1.0}) for n in range(2)]
    assert check_reward_nonzero_std(types.SimpleNamespace(reward_key="acc"), group).keep
    assert not check_reward_nonzero_std(types.SimpleNamespace(reward_key="score"), group).keep


def test_fallback_fills_the_batch_only_when_groups_run_short():
    verdict = check_reward_nonzero_std_with_fallback(ARGS, group_of(1.0, 1.0))
    assert should_drop_dynamic_filter_output(verdict, remaining=5, target=4)
    assert not should_drop_dynamic_filter_output(verdict, remaining=4, target=4)
    assert not should_drop_dynamic_filter_output(DynamicFilterOutput(True), remaining=9, target=4)
    assert should_drop_dynamic_filter_output(DynamicFilterOutput(False), remaining=1, target=4)


def test_filter_answers_are_wrapped_or_refused():
    assert call_dynamic_filter(None, ARGS, []).keep
    assert call_dynamic_filter(lambda args, group: False, ARGS, []) == DynamicFilterOutput(False)
    output = DynamicFilterOutput(False, "because")
    assert call_dynamic_filter(lambda args, group, **kw: output, ARGS, [], extra=1) is output
    with pytest.raises(HookError, match="--dynamic-sampling-filter-path: .* returned None"):
        call_dynamic_filter(lambda args, group: None, ARGS, [])


def test_rollouts_are_found_by_id_and_by_position_only_without_one():
    a, b, c = Sample(rollout_id=1), Sample(rollout_id=2), Sample(rollout_id=1)
    assert rollouts_of([a, b, c]) == [[a, c], [b]]
    assert rollouts_of([[a, c], [b]]) == [[a, c], [b]]
    x, y, z = Sample(), Sample(), Sample()
    assert [len(rollout) for rollout in rollouts_of([[x, y], z])] == [2, 1]
    assert [id(sample) for sample in flatten([[x, [y]], z])] == [id(x), id(y), id(z)]

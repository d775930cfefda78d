import json
import math
from types import SimpleNamespace

import numpy as np
import pytest

from slime.errors import DataError, HookError, RewardError
from slime.rollout.convert import policy_version, to_train_samples
from slime.rollout.outcome import rollout_reward
from slime.train.batch import TokenRewards, TurnRewards
from slime.utils.routes import UNKNOWN
from slime.utils.types import Sample
from tests.rollout.kit import finished

ARGS = SimpleNamespace()


def sample(index=0, group=0, **fields):
    return finished(Sample(index=index, group_index=group, rollout_id=index), **fields)


def test_a_row_carries_what_the_sample_carries():
    (row,) = to_train_samples([[sample(4, 1, weight_versions=["3", "4"])]], ARGS)
    assert (row.rollout_id, row.group_index, row.policy_version) == (4, 1, 3)
    assert row.tokens == (7, 8, 9)
    assert row.loss_mask == (1, 1)
    assert row.rollout_log_probs == (-0.5, -0.25)
    assert row.votes


def test_law_2_siblings_share_the_rollout_and_rows_have_unique_indices():
    rows = to_train_samples([[[sample(0), sample(0)], [sample(1)]], [sample(2, 1)]], ARGS)
    assert [row.index for row in rows] == [0, 1, 2, 3]
    assert [row.rollout_id for row in rows] == [0, 0, 1, 2]


def test_law_2_unset_ids_are_filled_without_touching_those_that_are_set():
    bare = [Sample(), Sample()]
    for one in bare:
        finished(one)
    rows = to_train_samples([[sample(0, 0)], bare, [[finished(Sample()), finished(Sample())]]], ARGS)
    assert [row.rollout_id for row in rows] == [0, 1, 2, 3, 3]
    assert [row.group_index for row in rows] == [0, 1, 1, 2, 2]


def test_one_rollout_id_in_two_groups_is_an_error():
    with pytest.raises(DataError, match="rollout_id 0 is in group 0 and in group 1"):
        to_train_samples([[sample(0, 0)], [sample(0, 1)]], ARGS)


@pytest.mark.parametrize(
    "fields",
    [{"status": Sample.Status.FAILED}, {"status": Sample.Status.ABORTED}, {"remove_sample": True}],
)
def test_law_4_what_must_not_train_does_not_vote_and_has_no_number_for_a_reward(fields):
    (row,) = to_train_samples([[sample(reward=None, **fields)]], ARGS)
    assert not row.votes
    assert math.isnan(row.reward)
    assert row.trained_tokens == 0


def test_a_failed_sample_without_tokens_is_still_a_row():
    (row,) = to_train_samples(
        [[Sample(index=0, group_index=0, rollout_id=0, status=Sample.Status.FAILED)]], ARGS
    )
    assert len(row.tokens) == 2
    assert row.response_length == len(row.loss_mask) == 1


def test_a_reward_that_is_missing_is_an_error():
    with pytest.raises(RewardError, match=r"sample 0 .*None"):
        to_train_samples([[sample(reward=None)]], ARGS)


def test_reward_dicts_are_read_by_key():
    args = SimpleNamespace(reward_key="score")
    (row,) = to_train_samples([[sample(reward={"score": 0.5})]], args)
    assert row.reward == 0.5


def test_a_reward_that_training_cannot_read_is_an_error():
    args = SimpleNamespace(reward_key="acc", eval_reward_key="score")
    with pytest.raises(RewardError, match=r"keys \['score'\], training reads the key 'acc' \(--reward-key\)"):
        to_train_samples([[sample(reward={"score": 0.5})]], args)
    with pytest.raises(RewardError, match="the reward is 0.5, training reads the key 'acc'"):
        to_train_samples([[sample(reward=0.5)]], args)


def test_ids_that_no_model_has_train_nothing():
    with pytest.raises(HookError, match="tokens holds -1"):
        to_train_samples([[sample(tokens=[7, 8, -1])]], ARGS)
    failed = sample(tokens=[-1, 8, 9], status=Sample.Status.FAILED)
    assert to_train_samples([[failed]], ARGS)[0].tokens == (0, 0)


def test_lengths_are_checked():
    with pytest.raises(HookError, match="loss_mask has length 1, response_length is 2"):
        to_train_samples([[sample(loss_mask=[1])]], ARGS)


def test_log_probs_may_be_missing_but_not_broken():
    (row,) = to_train_samples([[sample(rollout_log_probs=None, loss_mask=None)]], ARGS)
    assert row.rollout_log_probs is None
    assert row.loss_mask == (1, 1)
    with pytest.raises(HookError, match="is nan at response token 0"):
        to_train_samples([[sample(rollout_log_probs=[math.nan, 0.0])]], ARGS)


def test_versions_are_numbers_or_the_engines_first():
    assert policy_version(Sample(weight_versions=["default", "1"])) == 0
    assert policy_version(Sample(weight_versions=["12"])) == 12
    assert policy_version(Sample()) == 0
    with pytest.raises(DataError, match="'v2' is not a number"):
        policy_version(Sample(weight_versions=["v2"]))


@pytest.mark.parametrize(
    ("reward", "key", "expected", "total"),
    [
        ([0.5, 1.0], None, TokenRewards((0.5, 1.0)), 1.5),
        ({"tokens": [0.0, 1]}, None, TokenRewards((0.0, 1.0)), 1.0),
        ({"turns": [0.25]}, None, TurnRewards((0.25,)), 0.25),
        ({"score": {"turns": [0.25]}, "note": "x"}, "score", TurnRewards((0.25,)), 0.25),
        ({"score": [0.5, 0.5]}, "score", TokenRewards((0.5, 0.5)), 1.0),
    ],
)
def test_rewards_a_turn_and_a_token_arrive(reward, key, expected, total):
    args, one = SimpleNamespace(reward_key=key), sample(reward=reward)
    assert to_train_samples([[one]], args)[0].reward == expected
    assert rollout_reward([one], args) == total
    assert rollout_reward([one, one], args) == 2 * total


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ([0.5], "1 rewards, one a token, for 2 tokens"),
        ({"turns": [0.5, 0.5]}, "2 rewards, one a turn, for 1 turns .response of 2 tokens"),
        ([0.5, math.nan], "no finite number and no list"),
        ({"turns": "12"}, "no finite number and no list"),
    ],
)
def test_rewards_that_do_not_fit_name_hook_sample_and_lengths(reward, message):
    args = SimpleNamespace(custom_rm_path="my.reward")
    with pytest.raises(RewardError, match=message) as caught:
        to_train_samples([[sample(3, reward=reward)]], args)
    assert "sample 3 (rollout 3), my.reward" in str(caught.value)


def test_a_reward_that_is_not_finite_names_hook_and_sample():
    for args, source in (
        (SimpleNamespace(custom_rm_path="my.reward"), "my.reward"),
        (SimpleNamespace(rm_type="math"), "reward 'math'"),
    ):
        with pytest.raises(RewardError, match=f"{source} returned nan") as caught:
            to_train_samples([[sample(3, reward=math.nan)]], args)
        assert "sample 3 (rollout 3)" in str(caught.value)


def test_a_reward_on_a_token_that_does_not_train_is_an_error():
    with pytest.raises(RewardError, match="response token 1 of 2, which does not train"):
        to_train_samples([[sample(reward=[0.0, 1.0], loss_mask=[1, 0])]], ARGS)


SHAPE = SimpleNamespace(custom_reward_post_process_path="tests.rollout.hooks_for_tests.halve_rewards")


def test_the_users_function_shapes_the_rewards_of_what_votes_and_the_raw_ones_are_kept():
    failed = sample(1, reward=None, status=Sample.Status.FAILED)
    named = sample(2, reward=8.0, metadata={"raw_reward": 7.0})
    listed = sample(3, reward=[1.0, 2.0])
    rows = to_train_samples([[sample(0, reward=1.0), failed, named, listed]], SHAPE)
    assert [row.reward for row in rows if row.votes] == [0.5, 4.0, TokenRewards((0.5, 1.0))]
    assert [row.raw_reward for row in rows] == [1.0, None, 7.0, 3.0]
    assert math.isnan(rows[1].reward)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("one_list", "returned float raw_rewards for 2 samples"),
        ("too_few_rewards", "returned 1 rewards for 2 samples"),
        ("nan_rewards", r"sample 0 \(rollout 0\): the reward nan is no finite number"),
        ("nan_raw_rewards", r"raw reward nan of sample 0 \(rollout 0\)"),
        ("raises_in_shaping", "raised ZeroDivisionError"),
    ],
)
def test_a_function_that_shapes_rewards_wrongly_is_named(name, message):
    path = f"tests.rollout.hooks_for_tests.{name}"
    with pytest.raises((HookError, RewardError), match=message) as caught:
        to_train_samples([[sample(0), sample(1)]], SimpleNamespace(custom_reward_post_process_path=path))
    assert f"--custom-reward-post-process-path ({path})" in str(caught.value)


@pytest.mark.parametrize("field", ["multimodal_inputs", "multimodal_train_inputs"])
def test_images_are_refused_by_the_samples_name(field):
    held = sample(index=17, **{field: {"images": ["data:,x"]}})
    with pytest.raises(DataError, match=rf"sample 17 .*: {field} holds images"):
        to_train_samples([[held]], ARGS)
    held.remove_sample = True
    assert not to_train_samples([[held]], ARGS)[0].votes


SIZES = {"num_hidden_layers": 2, "num_experts": 8, "num_experts_per_tok": 3}


def replaying(folder):
    (folder / "config.json").write_text(json.dumps(SIZES))
    return SimpleNamespace(use_rollout_routing_replay=True, hf_checkpoint=str(folder))


def test_routes_of_experts_become_rows_of_tokens_layers_and_choices(tmp_path):
    routes = np.arange(12, dtype=np.int32)
    flat, shaped = (
        sample(0, rollout_routed_experts=routes),
        sample(1, rollout_routed_experts=routes.reshape(2, 2, 3)),
    )
    rows = to_train_samples([[flat, shaped]], replaying(tmp_path))
    assert all(np.array_equal(row.routed_experts, routes.reshape(2, 2, 3)) for row in rows)
    (plain,) = to_train_samples([[sample(0, rollout_routed_experts=routes)]], ARGS)
    assert plain.routed_experts is None


def test_tokens_behind_the_last_that_trains_need_no_routes(tmp_path):
    routes = np.arange(6, dtype=np.int32)
    tool = sample(0, rollout_routed_experts=routes, loss_mask=[1, 0], rollout_log_probs=[-0.5, 0.0])
    (row,) = to_train_samples([[tool]], replaying(tmp_path))
    assert row.routed_experts.tolist() == [routes.reshape(2, 3).tolist(), [[UNKNOWN] * 3] * 2]


@pytest.mark.parametrize(
    ("routes", "message"),
    [
        (None, "rollout_routed_experts is missing"),
        (np.zeros(6, np.int32), "has 6 numbers, 2 tokens lead to trained ones"),
        (np.zeros(13, np.int32), "13 numbers are no routes of 3 tokens through 2 layers with 3 experts"),
        (np.zeros(18, np.int32), "18 numbers are no routes of 3 tokens"),
    ],
)
def test_a_row_without_the_routes_that_it_is_to_replay_is_refused(tmp_path, routes, message):
    with pytest.raises(DataError, match=f"{message}.*--use-rollout-routing-replay"):
        to_train_samples([[sample(0, rollout_routed_experts=routes)]], replaying(tmp_path))

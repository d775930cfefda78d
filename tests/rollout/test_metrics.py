from collections import Counter
from types import SimpleNamespace

from slime.rollout.metrics import drop_metrics, rollout_metrics
from slime.utils.types import Sample

ARGS = SimpleNamespace()


def sample(index, group=0, length=2, reward=1.0, **fields):
    return Sample(
        index=index,
        rollout_id=fields.pop("rollout_id", index),
        group_index=group,
        tokens=[1] * (length + 1),
        response_length=length,
        loss_mask=[1] * length,
        reward=reward,
        status=fields.pop("status", Sample.Status.COMPLETED),
        **fields,
    )


def test_the_names_and_values_of_a_step():
    groups = [
        [sample(0, length=2, reward=0.0), sample(1, length=4, reward=1.0)],
        [
            sample(2, group=1, length=6, reward=1.0),
            sample(3, group=1, length=8, reward=1.0, status=Sample.Status.TRUNCATED),
        ],
    ]
    metrics = rollout_metrics(ARGS, groups, seconds=2.0)
    assert metrics["rollout/response_len/mean"] == 5.0
    assert metrics["rollout/response_len/median"] == 5.0
    assert metrics["rollout/response_len/max"] == 8
    assert metrics["rollout/response_len/min"] == 2
    assert metrics["rollout/truncated_ratio"] == 0.25
    assert metrics["rollout/raw_reward"] == 0.75
    assert metrics["rollout/zero_std/count_1.0"] == 1
    assert metrics["perf/rollout_time"] == 2.0
    assert metrics["perf/tokens_per_gpu_per_sec"] == 10.0
    assert metrics["perf/longest_sample_tokens_per_sec"] == 4.0


def test_a_rollout_counts_once_however_it_is_cut():
    whole = [[sample(0, length=6, reward=1.0), sample(1, length=2, reward=0.0)]]
    cut = [
        [
            [
                sample(0, length=4, reward=1.0, rollout_id=0),
                sample(0, length=2, reward=1.0, rollout_id=0),
            ],
            [sample(1, length=2, reward=0.0)],
        ]
    ]
    assert rollout_metrics(ARGS, whole, 1.0) == rollout_metrics(ARGS, cut, 1.0)


def test_law_4_failed_rollouts_are_in_no_mean():
    good = [[sample(0, reward=1.0), sample(1, reward=1.0)]]
    with_failed = [[*good[0], sample(2, length=90, reward=None, status=Sample.Status.FAILED)]]
    assert rollout_metrics(ARGS, good, 1.0) == rollout_metrics(ARGS, with_failed, 1.0)


def test_cached_tokens_are_a_share_of_all_prompt_tokens():
    info = Sample.PrefixCacheInfo(cached_tokens=3, total_prompt_tokens=4)
    metrics = rollout_metrics(ARGS, [[sample(0, prefix_cache_info=info), sample(1)]], 1.0)
    assert metrics["rollout/prefix_cache_hit_rate"] == 0.75
    assert metrics["rollout/avg_cached_tokens_per_sample"] == 1.5


def test_the_unshaped_reward_is_reported():
    metrics = rollout_metrics(ARGS, [[sample(0, reward=1.0, metadata={"raw_reward": 0.25})]], 1.0)
    assert metrics["rollout/raw_reward"] == 0.25


def test_the_age_of_carried_over_rollouts_shows():
    old = [sample(0, weight_versions=["3"]), sample(1, weight_versions=["3"])]
    new = [sample(2, 1, weight_versions=["5", "5"]), sample(3, 1, weight_versions=["5"])]
    metrics = rollout_metrics(ARGS, [old, new, [sample(4, 2)]], 1.0)
    assert metrics["rollout/policy_age/mean"] == 1.0
    assert metrics["rollout/policy_age/max"] == 2.0


def test_a_step_without_valid_rollouts_has_only_its_time():
    failed = sample(0, status=Sample.Status.FAILED, reward=None)
    assert rollout_metrics(ARGS, [[failed]], 3.0) == {"perf/rollout_time": 3.0}


def test_drops_are_named():
    assert drop_metrics(Counter({"zero_std_1.0": 2})) == {"rollout/dynamic_filter/drop_zero_std_1.0": 2.0}


def test_data_sets_of_a_mixture_have_rewards_of_their_own():
    names = {0: "gsm", 1: "gsm", 2: "code"}
    samples = [sample(n, reward=float(n), metadata={"slime_dataset": name}) for n, name in names.items()]
    sibling = sample(9, rollout_id=0, reward=0.0, metadata={"slime_dataset": "gsm"})
    metrics = rollout_metrics(ARGS, [[*samples, sibling]], 1.0)
    assert metrics["rollout/dataset/gsm/raw_reward"] == 0.5
    assert metrics["rollout/dataset/gsm/rollouts"] == 2.0
    assert metrics["rollout/dataset/code/raw_reward"] == 2.0


def test_agent_sessions_tell_what_became_of_their_tokens():
    tally = {"turns": 3, "tokens": 10, "tokens_trained": 8, "tokens_side": 2}
    siblings = [sample(0, rollout_id=0, metadata={"trajectory": tally}) for _ in range(2)]
    other = {"turns": 1, "tokens": 10, "tokens_trained": 10, "tokens_side": 0}
    metrics = rollout_metrics(
        ARGS, [*siblings, sample(1, rollout_id=1, metadata={"trajectory": other})], seconds=1.0
    )
    assert metrics["agent/turns"] == 2.0
    assert metrics["agent/samples"] == 1.5
    assert metrics["agent/tokens_side"] == 1.0
    assert metrics["agent/trained_share"] == 0.9
    assert "agent/turns" not in rollout_metrics(ARGS, [sample(0)], seconds=1.0)


def test_acceptance_of_drafts_is_over_all_verifications_of_the_step():
    infos = [
        Sample.SpecInfo(
            spec_accept_token_num=3, spec_draft_token_num=4, spec_verify_ct=2, completion_token_num=5
        ),
        Sample.SpecInfo(
            spec_accept_token_num=1, spec_draft_token_num=4, spec_verify_ct=2, completion_token_num=3
        ),
    ]
    groups = [[sample(index, spec_info=info) for index, info in enumerate(infos)]]
    metrics = rollout_metrics(ARGS, groups, 1.0)
    assert metrics["rollout/spec_accept_rate"] == 0.5
    assert metrics["rollout/spec_accept_length"] == 2.0
    assert "rollout/spec_accept_rate" not in rollout_metrics(ARGS, [[sample(0)]], 1.0)

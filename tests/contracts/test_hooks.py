"""Every contract of the other hooks is broken by one that names it, and kept by those that are shipped."""

import pytest

from slime.contracts import CONTRACTS, Stage, case_of, judge
from tests.contracts import broken_hooks

BROKEN = "tests.contracts.broken_hooks."
REWARD, FILTER, BUFFER, SOURCE = (
    "custom_rm_path",
    "dynamic_sampling_filter_path",
    "buffer_filter_path",
    "data_source_path",
)
SAMPLE_HOOK, SAMPLE_FILTER, ALL = (
    "rollout_sample_hook_path",
    "rollout_sample_filter_path",
    "rollout_all_samples_process_path",
)
SHAPE, LOG, EVAL_LOG = (
    "custom_reward_post_process_path",
    "custom_rollout_log_function_path",
    "custom_eval_rollout_log_function_path",
)
CONVERT = "custom_convert_samples_to_train_data_path"
ROLLOUT, EVAL = "rollout_function_path", "eval_function_path"


@pytest.fixture(scope="module")
def stage():
    with Stage([], seconds=8.0) as stage:
        yield stage


def finding(stage, dest, contract, path):
    by_name = {function.__name__: function for function in CONTRACTS[dest]}
    return judge(by_name[contract], case_of(stage, dest, path), path)


CASES = [
    (REWARD, "gives_a_number", "reward_none", "returned None, which is not a finite number"),
    (REWARD, "gives_a_number", "reward_nan", "returned nan, which is not a finite number"),
    (REWARD, "gives_a_number", "reward_raises", "ConnectionError: judge is down"),
    (REWARD, "gives_a_number", "reward_dict", "['score'], without a key named by --reward-key"),
    (REWARD, "leaves_the_sample_alone", "reward_spoils_tokens", "other tokens, mask"),
    (REWARD, "judges_many_at_once", "reward_by_itself", "already running"),
    (REWARD, "leaves_the_event_loop_free", "reward_blocks", "stood still for"),
    (FILTER, "judges_flat_and_nested_groups", "filter_none", "returned None, expected a bool"),
    (FILTER, "judges_flat_and_nested_groups", "filter_flat_only", "'list' object has no attribute 'reward'"),
    (FILTER, "judges_by_rollout", "filter_by_sample", "keep=False and keep=True"),
    (FILTER, "leaves_groups_alone", "filter_pops", "samples added, removed"),
    (BUFFER, "takes_out_of_the_buffer", "buffer_keeps", "left it in the buffer"),
    (BUFFER, "takes_out_of_the_buffer", "buffer_loses", "found 5 that are neither"),
    (BUFFER, "takes_out_of_the_buffer", "buffer_too_many", "expected a list of up to 0 groups"),
    (BUFFER, "takes_out_of_the_buffer", "buffer_makes_new", "was not in the buffer"),
    (SAMPLE_HOOK, "gives_a_sample_or_none", "sample_hook_number", "expected Sample or None, got float"),
    (SAMPLE_HOOK, "gives_a_sample_or_none", "sample_hook_cuts", "loss_mask has length 2"),
    (SAMPLE_FILTER, "marks_samples_only", "sample_filter_flat_only", "no attribute 'remove_sample'"),
    (SAMPLE_FILTER, "marks_samples_only", "sample_filter_removes", "samples added, removed"),
    (SAMPLE_FILTER, "marks_samples_only", "sample_filter_returns", "list, which nobody reads"),
    (ALL, "sees_all_groups", "all_samples_mean", "unsupported operand", "NoneType"),
    (SHAPE, "shapes_rewards", "shapes_one_list", "expected (raw_rewards, rewards)"),
    (SHAPE, "shapes_rewards", "shapes_nan", "nan"),
    (CONVERT, "converts_samples", "converts_short_masks", "loss_mask has length 2, response_length is 3"),
    (CONVERT, "converts_by_rollout", "converts_centred_over_samples", "for rollout 0"),
    (LOG, "logs_rollouts", "log_later", "is async, and nobody awaits it"),
    (LOG, "logs_rollouts", "log_every_reward", "NoneType"),
    (EVAL_LOG, "logs_evaluations", "eval_log_text", "returned 'logged', expected True"),
    (SOURCE, "takes_the_call", "NoMethods", "has no get_samples, add_samples, save, load, __len__"),
    (SOURCE, "knows_its_length", "NegativeLength", "__len__() should return >= 0"),
    (SOURCE, "gives_groups", "OneTooMany", "expected a list of 3 groups; found 4 groups"),
    (SOURCE, "gives_groups", "SameObject", "the same object twice"),
    (SOURCE, "gives_ids_once", "SameIds", "expected a new group_index each time; found [0, 1, 0, 1]"),
    (SOURCE, "takes_groups_back", "Forgets", "expected the groups that were given back, first"),
    (SOURCE, "goes_on_after_a_restart", "StartsAgain", "What is 2 times 7?", "found prompt 'What is 0"),
    (ROLLOUT, "gives_a_batch", "rollout_one_group", "expected 2 groups (--rollout-batch-size); found 1"),
    (ROLLOUT, "gives_a_batch", "rollout_none", "returned NoneType, expected RolloutFnTrainOutput"),
    (ROLLOUT, "gives_rows_that_train", "rollout_unrewarded", "returned None, which is not a finite number"),
    (ROLLOUT, "gives_whole_groups", "rollout_half_groups", "expected 2 rollouts a group; found 1 in group"),
    (ROLLOUT, "loses_no_group", "rollout_loses", "are gone"),
    (ROLLOUT, "loses_no_group", "rollout_loses_beside_the_books", "are gone, and 0 rollouts counted"),
    (ROLLOUT, "loses_no_group", "rollout_counts_too_few", "are gone, and 4 rollouts counted"),
    (ROLLOUT, "fails_with_the_engine", "rollout_makes_rewards", "expected no sample that counts; found 4"),
    (EVAL, "evaluates", "eval_short", "expected one of each a rollout in check; found 1 rewards, 8"),
    (EVAL, "evaluates", "eval_without_samples", "found no samples in mine"),
]


@pytest.mark.parametrize(("dest", "contract", "hook", "words"), [(d, c, h, w) for d, c, h, *w in CASES])
def test_a_broken_hook_is_caught_with_its_message(stage, dest, contract, hook, words):
    found = finding(stage, dest, contract, BROKEN + hook)
    assert found.verdict == "failed", found
    assert all(word in found.message for word in words), found.message
    assert found.remedy and found.law


@pytest.mark.parametrize("dest", [dest for dest in CONTRACTS if dest != "custom_generate_function_path"])
def test_a_wrong_signature_is_caught_for_every_flag(stage, dest):
    found = finding(stage, dest, "takes_the_call", BROKEN + "one_argument")
    assert found.verdict == "failed"
    assert "wrong signature" in found.message or "is not a class" in found.message
    others = [
        judge(contract, case_of(stage, dest, BROKEN + "one_argument"), dest) for contract in CONTRACTS[dest]
    ]
    assert {other.verdict for other in others[1:]} <= {"not applicable"}


def test_every_contract_has_a_hook_that_breaks_it():
    wanted = {
        (dest, contract.__name__)
        for dest, contracts in CONTRACTS.items()
        for contract in contracts
        if dest != "custom_generate_function_path" and contract.__name__ != "takes_the_call"
    }
    assert {case[:2] for case in CASES} >= wanted - {(REWARD, "gives_a_number_a_sample")}
    assert all(hasattr(broken_hooks, case[2]) for case in CASES)


def test_what_hangs_is_ended_at_its_deadline():
    with Stage([], seconds=0.5) as stage:
        reward = finding(stage, REWARD, "gives_a_number", BROKEN + "reward_hangs")
        judge_of_groups = finding(stage, FILTER, "judges_by_rollout", BROKEN + "filter_hangs")
    assert "did not finish within 0.5 s" in reward.message
    assert "took longer than 0.5 s" in judge_of_groups.message


def test_groups_that_are_counted_as_dropped_are_not_lost(stage):
    found = finding(stage, ROLLOUT, "loses_no_group", BROKEN + "rollout_counts_what_it_drops")
    assert found.verdict == "passed", found


@pytest.mark.parametrize(
    ("hook", "words"),
    [
        ("tests.rollout.agent_hooks.reward_group", None),
        (BROKEN + "reward_one_for_all", "returned float for a group of 4 samples"),
        (BROKEN + "reward_expects_groups_of_four", "returned 4 rewards for a group of 8 samples"),
    ],
)
def test_a_group_reward_gets_flat_lists(hook, words):
    with Stage(["--group-rm"]) as stage:
        found = finding(stage, REWARD, "gives_a_number_a_sample", hook)
    assert found.verdict == ("failed" if words else "passed")
    assert words is None or words in found.message


def test_reward_dicts_need_the_key_that_training_reads():
    with Stage(["--reward-key", "score"]) as stage:
        assert finding(stage, REWARD, "gives_a_number", BROKEN + "reward_dict").verdict == "passed"
    with Stage(["--reward-key", "acc"]) as stage:
        found = finding(stage, REWARD, "gives_a_number", BROKEN + "reward_dict")
    assert found.verdict == "failed" and "without 'acc'" in found.message


@pytest.mark.parametrize("hook", ["reward_by_length", "reward_sync"])
def test_rewards_keep_every_contract_async_or_not(stage, hook):
    path = (
        "tests.rollout.agent_hooks." if hook == "reward_by_length" else "tests.rollout.hooks_for_tests."
    ) + hook
    case = case_of(stage, REWARD, path)
    assert {judge(contract, case, path).verdict for contract in CONTRACTS[REWARD]} <= {
        "passed",
        "not applicable",
    }


def test_a_blocking_reward_on_a_thread_leaves_the_loop_free(stage):
    path = BROKEN + "reward_blocks_a_thread"
    assert finding(stage, REWARD, "leaves_the_event_loop_free", path).verdict == "passed"

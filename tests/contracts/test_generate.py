"""Every contract of generate hooks is broken by a hook that names it, and kept by those that are shipped."""

import pytest

from slime.contracts import CONTRACTS, NotApplicableError, Stage, case_of, judge
from slime.contracts.finding import name_of
from tests.contracts import broken_generate

DEST = "custom_generate_function_path"
BROKEN = "tests.contracts.broken_generate."
BY_NAME = {contract.__name__: contract for contract in CONTRACTS[DEST]}
GOOD = "slime.rollout.sglang_rollout.generate"


@pytest.fixture(scope="module")
def stage():
    with Stage([], seconds=4.0) as stage:
        yield stage


def finding(stage, contract, path):
    return judge(BY_NAME[contract], case_of(stage, DEST, path), path)


CASES = [
    ("takes_the_call", "takes_the_call", "has the wrong signature: expected (args, sample, sampling_params"),
    ("gives_a_rollout", "gives_a_rollout", "raised HookError", "KeyError: 'tools'"),
    ("gives_a_rollout", "gives_up", "status FAILED (the sandbox is on fire)"),
    ("gives_a_rollout", "exits", "raised SystemExit"),
    ("returns_samples", "returns_samples_sync", "is not async: it returned Sample"),
    ("returns_samples", "returns_samples", "expected a Sample or a non-empty list of Samples"),
    ("returns_samples", "returns_samples_none_of_them", "expected a Sample or a non-empty list of Samples"),
    ("asks_the_engine", "asks_the_engine", "expected a request at the engine; found none"),
    ("keeps_the_ids", "keeps_the_ids", "expected rollout_id 0; found rollout_id 99"),
    ("keeps_the_ids", "keeps_the_ids_of_siblings", "expected group_index 0; found group_index 77"),
    ("siblings_are_one_rollout", "siblings_are_one_rollout", "different rollout_id [0, 99]"),
    ("siblings_are_one_rollout", "siblings_are_one_rollout_twice", "the same Sample twice"),
    ("lengths_agree", "lengths_agree", "loss_mask has length 1, response_length is 18"),
    ("trains_only_sampled_tokens", "asks_the_engine", "token 11 ", "never sent"),
    (
        "trains_only_sampled_tokens",
        "trains_only_sampled_tokens",
        "(' ') at response position 0",
        "never sent",
    ),
    ("trains_only_sampled_tokens", "trains_only_sampled_tokens_of_tools", "('<') at", "read in a prompt"),
    ("trains_tokens_in_their_context", "trains_tokens_in_their_context", "other tokens in front of token"),
    ("trains_each_token_once", "trains_each_token_once", "which trains in an earlier row too"),
    ("keeps_the_engines_log_probs", "keeps_the_engines_log_probs", "expected log-prob -0.", "found 0.0"),
    ("keeps_sampling_params", "keeps_sampling_params", "changes of ['max_new_tokens']"),
    ("keeps_sampling_params", "keeps_sampling_params_in_requests", "expected temperature 1.0", "0.2"),
    ("reward_is_a_number_or_unset", "reward_is_a_number_or_unset", "returned nan"),
    ("can_be_stored", "can_be_stored", "metadata.client holds a object"),
    ("repeats_itself", "repeats_itself", "expected the same trained ids in two runs"),
    ("leaves_nothing_running", "leaves_nothing_running", "expected no task left; found sleep"),
    ("leaves_the_event_loop_free", "leaves_the_event_loop_free", "that it stood still in 1 request(s)"),
    ("keeps_rollouts_apart", "keeps_rollouts_apart", "the prompt of 'heron' in the rollout of 'alpha'"),
    (
        "takes_evaluation",
        "takes_evaluation",
        "expected a rollout with evaluation=True",
        "NotImplementedError",
    ),
    ("ends_when_the_engine_aborts", "ends_when_the_engine_aborts", "found status COMPLETED"),
    ("ends_when_it_is_cancelled", "ends_when_it_is_cancelled", "swallowed the cancellation and returned"),
    ("ends_when_it_is_cancelled", "ends_when_it_is_cancelled_at_the_engine", "1 that go on"),
    ("ends_before_a_silent_engine", "ends_before_a_silent_engine", "status TRUNCATED and reward 0.0"),
    ("fails_with_the_engine", "fails_with_the_engine", "status COMPLETED and reward 0.0"),
    ("fails_with_a_later_turn", "fails_with_a_later_turn", "status 500 in a later turn; found status"),
    ("outlives_an_overload", "outlives_an_overload", "2 others that train"),
]


@pytest.mark.parametrize(("contract", "hook", "words"), [(c, h, w) for c, h, *w in CASES])
def test_a_broken_hook_is_caught_with_its_message(stage, contract, hook, words):
    found = finding(stage, contract, BROKEN + hook)
    assert found.verdict == "failed", found
    assert all(word in found.message for word in words), found.message
    assert found.remedy and found.law


def test_every_contract_has_a_hook_that_breaks_it():
    assert {case[0] for case in CASES} == set(BY_NAME)
    assert all(hasattr(broken_generate, name) for name in BY_NAME)


def test_a_hook_that_hangs_is_ended_at_its_deadline():
    with Stage([], seconds=0.5) as stage:
        found = finding(stage, "gives_a_rollout", BROKEN + "hangs")
        rest = finding(stage, "lengths_agree", BROKEN + "hangs")
    assert found.verdict == "failed" and "took longer than 0.5 s" in found.message
    assert rest.verdict == "not applicable"


@pytest.mark.parametrize("contract", BY_NAME)
@pytest.mark.parametrize("path", [GOOD, "tests.contracts.good_generate.two_turns"])
def test_good_hooks_keep_every_contract(stage, contract, path):
    found = finding(stage, contract, path)
    assert found.verdict != "failed", found


def test_law_and_name_come_from_the_function():
    for contract in CONTRACTS[DEST]:
        assert contract.__doc__ and name_of(contract) == contract.__name__.replace("_", " ")


def test_nothing_to_look_at_is_no_failure(stage):
    with pytest.raises(NotApplicableError):
        BY_NAME["fails_with_a_later_turn"](case_of(stage, DEST, GOOD))

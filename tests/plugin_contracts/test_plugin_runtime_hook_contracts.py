"""Contracts of rewards, filters, sample hooks, shaping of rewards and logs: of slime's, or of your own.

    python tests/plugin_contracts/test_plugin_runtime_hook_contracts.py --custom-rm-path my.module.reward

The flags are those of training; without any, and under pytest, what is shipped is checked.
"""

import sys

import pytest

from slime.contracts import CONTRACTS, Stage, case_of, judge, script

DESTS = (
    "rollout_sample_hook_path",
    "custom_rm_path",
    "dynamic_sampling_filter_path",
    "rollout_sample_filter_path",
    "rollout_all_samples_process_path",
    "custom_reward_post_process_path",
    "custom_convert_samples_to_train_data_path",
    "custom_rollout_log_function_path",
    "custom_eval_rollout_log_function_path",
)
SHIPPED = (
    ("custom_rm_path", "examples.quickstart.reward.just_the_number"),
    (
        "dynamic_sampling_filter_path",
        "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std",
    ),
    (
        "dynamic_sampling_filter_path",
        "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std_with_fallback",
    ),
    ("custom_reward_post_process_path", "slime.rollout.on_policy_distillation.post_process_rewards"),
)


@pytest.fixture(scope="module")
def stage():
    with Stage([]) as stage:
        yield stage


@pytest.mark.parametrize(
    ("dest", "path", "contract"),
    [
        pytest.param(dest, path, contract, id=f"{path}-{contract.__name__}")
        for dest, path in SHIPPED
        for contract in CONTRACTS[dest]
    ],
)
def test_what_is_shipped_keeps_its_contracts(stage, dest, path, contract):
    finding = judge(contract, case_of(stage, dest, path), path)
    assert finding.verdict != "failed", f"{finding.message}\n{finding.remedy}"


if __name__ == "__main__":
    sys.exit(script(sys.argv[1:], DESTS, sys.argv[0], SHIPPED))

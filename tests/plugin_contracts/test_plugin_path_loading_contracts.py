"""Paths of hooks: that they load and take slime's call, for every flag; of slime's, or of your own.

    python tests/plugin_contracts/test_plugin_path_loading_contracts.py --custom-tis-function-path my.module.f

The flags are those of training; without any, and under pytest, what is shipped is checked. Hooks that are
named are tried by all their other contracts, too.
"""

import sys
from types import SimpleNamespace

import pytest

from slime.contracts import CONTRACTS, Stage, case_of, judge, script
from slime.errors import HookError
from slime.rollout import hooks
from slime.rollout.hooks import check_hooks, flag_name
from slime.utils.misc import load_function

SHIPPED = (
    ("rollout_function_path", "slime.rollout.sft_rollout.generate_rollout"),
    ("rollout_function_path", "slime.rollout.fully_async_rollout.generate_rollout_fully_async"),
    ("data_source_path", "slime.rollout.data_source.RolloutDataSourceWithBuffer"),
    ("custom_generate_function_path", "examples.coding_agent_rl.generate.generate"),
    ("rollout_sample_hook_path", "slime.rollout.on_policy_distillation.ask_teacher"),
    ("custom_rm_path", "slime.rollout.on_policy_distillation.reward_func"),
    ("custom_reward_post_process_path", "slime.rollout.on_policy_distillation.post_process_rewards"),
)


@pytest.fixture(scope="module")
def stage():
    with Stage([]) as stage:
        yield stage


@pytest.mark.parametrize(("dest", "path"), SHIPPED)
def test_what_is_shipped_takes_the_call(stage, dest, path):
    finding = judge(CONTRACTS[dest][0], case_of(stage, dest, path), path)
    assert (finding.contract, finding.verdict) == ("takes the call", "passed"), finding.message


def test_every_flag_that_names_a_hook_has_contracts():
    assert set(CONTRACTS) == set(hooks.CONTRACTS)


@pytest.mark.parametrize("dest", CONTRACTS)
@pytest.mark.parametrize("path", ["no_such_module.f", "slime.errors.absent", "no_dots"])
def test_a_path_that_does_not_load_is_told_with_its_flag(dest, path):
    with pytest.raises(HookError) as caught:
        check_hooks(SimpleNamespace(**{dest: path}))
    assert caught.value.place == flag_name(dest)
    assert path in str(caught.value) or path.rpartition(".")[0] in str(caught.value)


def test_both_ways_to_write_a_path_load_the_same():
    assert load_function("slime.errors:HookError") is load_function("slime.errors.HookError") is HookError


if __name__ == "__main__":
    sys.exit(script(sys.argv[1:], tuple(CONTRACTS), sys.argv[0], SHIPPED[2:3]))

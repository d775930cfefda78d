"""Contracts of rollout functions, eval functions and data sources: of slime's, or of your own.

    python tests/plugin_contracts/test_plugin_rollout_contracts.py --rollout-function-path my.module.rollout

The flags are those of training; without any, and under pytest, what is shipped is checked.
"""

import sys

import pytest

from slime.contracts import CONTRACTS, Stage, case_of, judge, script

DESTS = ("rollout_function_path", "eval_function_path", "data_source_path", "buffer_filter_path")
SHIPPED = (
    ("rollout_function_path", "slime.rollout.sglang_rollout.generate_rollout"),
    ("rollout_function_path", "slime.rollout.fully_async_rollout.generate_rollout_fully_async"),
    ("eval_function_path", "slime.rollout.sglang_rollout.generate_rollout"),
    ("eval_function_path", "slime.rollout.fully_async_rollout.generate_rollout_fully_async"),
    ("data_source_path", "slime.rollout.data_source.RolloutDataSource"),
    ("data_source_path", "slime.rollout.data_source.RolloutDataSourceWithBuffer"),
    ("buffer_filter_path", "slime.rollout.data_source.pop_first"),
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

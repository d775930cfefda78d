"""Contracts of generate hooks: of slime's, or of your own.

    python tests/plugin_contracts/test_plugin_generate_contracts.py --custom-generate-function-path my.mod.f

The flags are those of training; without any, and under pytest, what is shipped is checked.
"""

import sys

import pytest

from slime.contracts import CONTRACTS, Stage, case_of, judge, script

DESTS = ("custom_generate_function_path",)
SHIPPED = (("custom_generate_function_path", "slime.rollout.sglang_rollout.generate"),)


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

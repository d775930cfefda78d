"""Hooks behind an adapter, those of the documentation and of the coding agent, keep their contracts."""

import importlib.util

import pytest

from examples.coding_agent_rl.make_data import make
from slime.agent.harness import HARNESSES
from slime.contracts import CONTRACTS, Stage, case_of, judge
from tests.agent.templates import family_tokenizer
from tests.examples.test_coding_agent_rl import ProgramHarness, environment

DEST = "custom_generate_function_path"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    family_tokenizer("qwen3").save_pretrained(folder)
    return folder


def failures(stage, path):
    case = case_of(stage, DEST, path)
    found = [judge(contract, case, path) for contract in CONTRACTS[DEST]]
    return [(f.contract, f.message) for f in found if f.verdict == "failed"], found


@pytest.mark.skipif(importlib.util.find_spec("openai") is None, reason="the client is an extra")
def test_a_program_behind_an_adapter_keeps_every_contract(model):
    with Stage(["--hf-checkpoint", str(model)]) as stage:
        failed, found = failures(stage, "tests.contracts.adapter_hook.generate")
    assert failed == []
    assert next(f for f in found if f.contract == "fails with a later turn").verdict == "passed"


@pytest.mark.slow
def test_the_coding_agent_keeps_every_contract(model, tmp_path, monkeypatch):
    monkeypatch.setitem(HARNESSES, "program", ProgramHarness("ask('repair it')\n"))
    data = make(tmp_path)
    flags = ["--hf-checkpoint", str(model), "--prompt-data", f"{data}", "--rollout-max-response-len", "64"]
    budgets = {"SWE_AGENT_TIME_BUDGET_SEC": 20, "SWE_ROLLOUT_GUARD_SEC": 50}
    with environment(SWE_AGENT="program", SWE_BOOT_RETRIES=0, **budgets), Stage(flags, seconds=60.0) as stage:
        failed, _ = failures(stage, "examples.coding_agent_rl.generate.generate")
    assert failed == []

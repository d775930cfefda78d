"""Whole runs of `slime train` through real SGLang servers."""

import json
from pathlib import Path

import pytest

from examples.coding_agent_rl.make_data import make
from tests.agent.tokenizers import real_tokenizer
from tests.clients.clients import NODE_PROGRAMS, available
from tests.e2e.conftest import World
from tests.e2e.kills import Life, marked, steps_logged, until, until_gone
from tests.e2e.test_pool import check
from tests.examples.test_coding_agent_rl import environment, train
from tests.sglang.install import OLDER_PYTHON, PYTHON, is_installed
from tests.tiny import tiny_model_dir

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not is_installed(), reason="SGLang is not installed: run `make sglang`"),
]
SGLANG = {
    "sglang_python": PYTHON,
    "sglang_dtype": "float32",
    "sglang_mem_fraction_static": 0.05,
    "sglang_max_total_tokens": 16384,
}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("world")
    rows = [{"input": [{"role": "user", "content": f"say {n}"}], "label": str(n)} for n in range(12)]
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return World(folder, tiny_model_dir(folder / "model", arch="qwen3"), data)


@pytest.mark.parametrize("python", [PYTHON, OLDER_PYTHON], ids=["0.5.23", "0.5.15"])
def test_a_run_trains_on_what_sglang_samples_by_the_weights_of_the_moment(world, python):
    name = f"run-{python.parents[1].name}"
    flags = SGLANG | {"sglang_python": python, "engine_num_threads": None, "lr": 1e-2}
    world.train(name, num_rollout=3, check_weight_update_equal=True, **flags)
    check(world, name, 3)


def test_an_engine_behind_the_real_router_is_killed_and_replaced_and_nothing_is_lost(world):
    flags = world.flags(
        "killed",
        rollout_num_gpus=2,
        num_rollout=6,
        use_fault_tolerance=True,
        update_weight_transport="nccl",
        custom_generate_function_path="tests.e2e.hooks.ambles",
        engine_num_threads=None,
        **SGLANG,
    )
    life = Life(flags, world.folder / "killed.log")
    try:
        until(life, lambda: steps_logged(world.folder / "killed" / "metrics.jsonl") >= 1)
        victim = next(process for process in marked(life.mark) if "sglang.launch_server" in process.cmdline())
        victim.kill()
        assert life.process.wait(500) == 0, life.log.read_text()
        until_gone(life)
    finally:
        life.kill()
    assert "is started again (2 times more)" in life.log.read_text()
    check(world, "killed", 6)


def test_a_real_coding_agent_is_trained_through_sglang_for_one_step(tmp_path):
    real_tokenizer("qwen3")
    if not available("claude_code"):
        pytest.skip("claude_code is not installed: run `make clients`")
    variables = {"SWE_AGENT": "claude_code", "SWE_AGENT_PREFIX": NODE_PROGRAMS.parent, "SWE_MAX_TURNS": 2}
    flags = {
        "prompt-data": make(tmp_path / "data"),
        "custom-generate-function-path": "examples.coding_agent_rl.generate.generate",
        "rollout-batch-size": 1,
        "rollout-max-response-len": 32,
        "rollout-max-context-len": 40000,
        "rollout-timeout": 2700,
        "run-dir": tmp_path / "train",
    } | {
        name.replace("_", "-"): value for name, value in (SGLANG | {"sglang_max_total_tokens": 98304}).items()
    }
    with environment(**variables):
        step = train(tmp_path, flags)
    assert step["agent/trained_share"] == 1.0 and 1 <= step["agent/turns"] <= 2
    assert step["rollout/accounting/trained"] == 2
    assert step["train/train_rollout_logprob_abs_diff"] < 1e-4


def test_a_run_moves_adapters_alone_and_samples_with_them(world, tmp_path):
    """The layers of the server are those of `all-linear`."""
    unpinned = tmp_path / "python"
    shim = Path(__file__).parent / "lora_shim"
    unpinned.write_text(f'#!/bin/sh\nPYTHONPATH="{shim}" exec "{PYTHON}" "$@"\n')
    unpinned.chmod(0o755)
    layers = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    flags = SGLANG | {
        "sglang_python": unpinned,
        "sglang_enable_lora": True,
        "sglang_max_lora_rank": 4,
        "sglang_lora_target_modules": layers,
        "sglang_lora_backend": "torch_native",
        "sglang_max_loras_per_batch": 2,
        "lora_rank": 4,
        "update_weight_transport": "lora",
        "update_weight_disk_dir": world.folder / "adapters",
        "check_weight_update_equal": True,
        "engine_num_threads": None,
        "lr": 1e-1,
    }
    world.train("lora", num_rollout=3, **flags)
    check(world, "lora", 3)

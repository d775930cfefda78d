import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from slime.config.training_sections import TrainConfig
from slime.errors import ModelError
from slime.train.memory import default_chunk, estimate_memory, micro_batch_tokens, weight_shapes
from tests.tiny import tiny_model, tiny_model_dir

ROOT = Path(__file__).resolve().parents[2]
FACTOR = 1.35
"""The estimate is within this factor of the measured peak, either way."""
WIDE = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6, "vocab_size": 8192}


def flags(**more):
    base = {"train_precision": "float32", "use_dynamic_batch_size": True, "max_tokens_per_gpu": 2048}
    return base | {"train_num_threads": 1} | more


def measured(folder, tokens, train):
    command = [sys.executable, "-m", "tests.train.peak", str(folder), str(tokens), json.dumps(train)]
    env = dict(os.environ) | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT, env=env)
    return json.loads(done.stdout.splitlines()[-1])["bytes"]


def estimated(folder, train, **more):
    return estimate_memory(
        Path(folder), TrainConfig(**train), **({"has_reference": False, "longest_row": None} | more)
    )


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    return tiny_model_dir(tmp_path_factory.mktemp("wide") / "m", **WIDE)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
@pytest.mark.parametrize(
    "more", [{}, {"gradient_checkpointing": True}, {"lora_rank": 8}], ids=["plain", "recompute", "lora"]
)
def test_the_estimate_is_near_the_measured_peak(wide, more):
    train = flags(**more)
    ratio = estimated(wide, train).total / measured(wide, 2048, train)
    assert 1 / FACTOR < ratio < FACTOR


@pytest.mark.slow
def test_the_estimate_is_near_the_measured_peak_of_a_real_model():
    folder = ROOT / "models" / "smollm2-135m-instruct"
    train = flags(max_tokens_per_gpu=1024)
    ratio = estimated(folder, train).total / measured(folder, 1024, train)
    assert 1 / FACTOR < ratio < FACTOR


@pytest.mark.parametrize("tied", [False, True])
def test_parameters_are_counted_exactly(tmp_path, tied):
    folder = tiny_model_dir(tmp_path / "m", tie_word_embeddings=tied)
    count = sum(p.numel() for p in tiny_model(tie_word_embeddings=tied).parameters())
    found = estimated(folder, flags())
    assert (found.weights, found.optimizer) == (4 * count, 8 * count)
    assert found.gradients == 4 * (count + 2 * 259 * 64)
    assert estimated(folder, flags(), has_reference=True).weights == 8 * count


def test_adapters_are_counted_exactly(tmp_path):
    from tests.backends.rollouts import make_trainer

    folder = tiny_model_dir(tmp_path / "m")
    for targets in (["all-linear"], ["q_proj", "v_proj"]):
        trainer = make_trainer(folder, lora_rank=4, lora_target_modules=targets)
        trained = sum(p.numel() for _, p in trainer.named_parameters())
        found = estimated(folder, flags(lora_rank=4, lora_target_modules=targets))
        assert (found.gradients, found.optimizer) == (4 * trained, 8 * trained)


def test_routed_experts_count_no_adapters(tmp_path):
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    few = estimated(tiny_model_dir(tmp_path / "a", arch="qwen3_moe", **sizes), flags(lora_rank=4))
    sizes["num_experts"] = 8
    more = estimated(tiny_model_dir(tmp_path / "b", arch="qwen3_moe", **sizes), flags(lora_rank=4))
    routers = 2 * 4 * 4  # two layers, four more rows each, rank 4
    assert more.gradients - few.gradients == 4 * routers


def test_several_processes_share_weights_and_moments_but_each_loads_the_whole(tmp_path):
    folder = tiny_model_dir(tmp_path / "m")
    count = sum(p.numel() for p in tiny_model().parameters())
    found = estimated(folder, flags(actor_num_gpus_per_node=4))
    assert (found.weights, found.optimizer) == (count + 4 * 2 * 259 * 64, 2 * count)
    assert found.loading == 4 * count and "in each of 4 processes" in found.line()


def test_a_micro_batch_is_the_budget_or_the_longest_row_or_rows():
    assert micro_batch_tokens(TrainConfig(**flags()), None) == 2048
    assert micro_batch_tokens(TrainConfig(**flags()), 5000) == 5000
    assert micro_batch_tokens(TrainConfig(micro_batch_size=3), 100) == 300
    assert micro_batch_tokens(TrainConfig(tree_batches="off"), 100) == 100
    with pytest.raises(ModelError, match="rollout-max-context-len"):
        micro_batch_tokens(TrainConfig(), None)


def test_sharded_folders_are_read_through_their_index(tmp_path):
    folder = tiny_model_dir(tmp_path / "m")
    whole = weight_shapes(folder)
    tiny_model().save_pretrained(tmp_path / "sharded", max_shard_size="100KB")
    assert (tmp_path / "sharded" / "model.safetensors.index.json").is_file()
    assert weight_shapes(tmp_path / "sharded") == whole


def test_folders_that_do_not_say_are_refused(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="no safetensors"):
        estimated(tmp_path, flags())
    (tmp_path / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0nonsense")
    with pytest.raises(ModelError, match="not a safetensors file"):
        estimated(tmp_path, flags())


def test_default_chunk_bounds_memory():
    assert default_chunk(49152) * 49152 * 4 <= 256 * 2**20
    assert default_chunk(10**9) == 64

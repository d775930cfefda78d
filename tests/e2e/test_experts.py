"""A mixture of experts in the whole loop: the engine's routes reach the trainer, and the two agree."""

import pytest

from slime.rollout.dump import load_file
from tests.tiny import tiny_model_dir

pytestmark = pytest.mark.slow


def test_a_run_trains_through_the_experts_that_the_engine_took(world):
    sizes = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    model = tiny_model_dir(world.folder / "moe", arch="qwen3_moe", **sizes)
    dumps = world.folder / "moe-run" / "{rollout_id}.jsonl"
    world.train(
        "moe-run",
        hf_checkpoint=model,
        use_rollout_routing_replay=True,
        save_debug_rollout_data=dumps,
        num_rollout=3,
    )
    gaps = [r["train/train_rollout_logprob_abs_diff"] for r in world.metrics("moe-run") if "train/loss" in r]
    assert len(gaps) == 3 and max(gaps) < 1e-4
    samples = load_file(str(dumps).format(rollout_id=2))
    assert all(s.rollout_routed_experts.shape == (len(s.tokens) - 1, 2, 2) for s in samples)

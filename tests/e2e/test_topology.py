"""A run with a topology: several engines of the policy, and another model that is asked by name."""

import pytest
import yaml

from tests.e2e.test_pool import check
from tests.tiny import tiny_model_dir


@pytest.mark.slow
def test_models_are_asked_by_name_and_only_the_trained_one_gets_weights(world, tmp_path):
    models = [
        {"name": "actor", "server_groups": [{"worker_type": "regular", "num_gpus": 2}]},
        {
            "name": "judge",
            "model_path": str(tiny_model_dir(tmp_path / "judge", seed=7)),
            "server_groups": [
                {"worker_type": "placeholder", "num_gpus": 1},
                {"worker_type": "regular", "num_gpus": 1, "overrides": {"max_running_requests": 4}},
            ],
        },
    ]
    topology = tmp_path / "topology.yaml"
    topology.write_text(yaml.safe_dump({"sglang": models}))
    text = world.train(
        "topology",
        sglang_config=str(topology),
        rollout_engine="embedded",
        custom_rm_path="tests.e2e.hooks.asks_the_judge",
        router_policy="round_robin",
    )
    assert "actor: 2 regular of 1 GPU, updated; judge: 1 regular of 1 GPU, frozen" in text
    check(world, "topology", 2)

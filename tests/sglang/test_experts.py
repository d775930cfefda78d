"""Routes of a real SGLang: the trainer that replays them computes the engine's log-probs."""

import asyncio
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from slime.config.serving_sections import WeightsConfig
from slime.config.training_sections import AlgorithmConfig
from slime.rollout.convert import to_train_samples
from slime.rollout.generate import generate_sample
from slime.serving.endpoint import EngineEndpoint
from slime.serving.router import free_port
from slime.serving.sglang.command import EngineLaunch
from slime.serving.sglang.process import SGLangProcess
from slime.serving.weights.factory import make_weight_sync
from slime.utils.engine_client import EngineClient
from slime.utils.types import Sample
from tests.backends.rollouts import make_trainer
from tests.backends.test_replay import own_routes
from tests.rollout.kit import tokenizer
from tests.sglang.install import PYTHON, is_installed
from tests.tiny import tiny_model_dir

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not is_installed(), reason="SGLang is not installed: run `make sglang`"),
]
FLAGS = {
    "dtype": "float32",
    "max_total_tokens": "2048",
    "max_running_requests": 4,
    "context_length": "512",
}
SIZES = {
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
    "initializer_range": 0.1,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model_dir(tmp_path_factory.mktemp("sglang") / "moe", arch="qwen3_moe", **SIZES)


@pytest.fixture(scope="module")
def engine(folder, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent / "pinning"))
        process = SGLangProcess(
            EngineLaunch(
                model_path=str(folder),
                host="127.0.0.1",
                port=free_port("127.0.0.1"),
                seed=1,
                return_routed_experts=True,
                flags=FLAGS,
            ),
            tmp_path_factory.mktemp("log") / "sglang.log",
            python=str(PYTHON),
            ready_timeout=900,
        )
    yield process
    process.stop(5.0)


@pytest.fixture(scope="module")
def trainer(folder):
    return make_trainer(folder, algorithm=AlgorithmConfig(use_rollout_routing_replay=True), temperature=1.0)


def grown(engine, sample, folder, budget):
    """The sample after one call of the engine."""
    return asyncio.run(
        generate_sample(
            sample,
            {"max_new_tokens": budget, "temperature": 1.0, "ignore_eos": True},
            engine=EngineClient(engine.url),
            tokenizer=tokenizer(),
            max_context_len=None,
            timeout=300.0,
            args=SimpleNamespace(use_rollout_routing_replay=True, hf_checkpoint=str(folder)),
        )
    )


def replayed(trainer, sample, folder):
    """The sample as a row, and the log-probs of its response by the trainer."""
    sample.reward = 1.0
    settings = SimpleNamespace(use_rollout_routing_replay=True, hf_checkpoint=str(folder))
    (row,) = to_train_samples([[sample]], settings)
    (found,) = trainer.log_probs([row])
    return row, found


def test_replayed_routes_give_the_log_probs_of_the_engine(engine, folder, trainer):
    sample = grown(engine, Sample(prompt="two and two", index=0), folder, 8)
    sample = grown(engine, sample, folder, 16)  # the second call tells the routes of its own tokens only
    assert sample.rollout_routed_experts.shape == (len(sample.tokens) - 1, 3, 2)
    row, found = replayed(trainer, sample, folder)
    assert found == pytest.approx(sample.rollout_log_probs, abs=1e-4)
    own = own_routes(trainer, row)
    assert (np.sort(own) == np.sort(row.routed_experts)).mean() > 0.99


def test_experts_are_updated_under_the_names_of_the_checkpoint(engine, folder, trainer):
    with torch.no_grad():
        for name, parameter in trainer.named_parameters():
            if "experts" in name or "gate" in name:
                parameter.mul_(-1.3)
    sync = make_weight_sync(
        WeightsConfig(update_weight_transport="tensor"),
        source=trainer,
        engine_kind="sglang",
        hf_checkpoint=str(folder),
        timeout=300.0,
        one_machine=True,
    )
    sync.connect([EngineEndpoint(name="e", url=engine.url, kind="sglang")])
    try:
        assert not sync.update(1, "abort").failed
    finally:
        sync.close()
    sample = grown(engine, Sample(prompt="and two more", index=1), folder, 12)
    assert sample.weight_versions == ["1"]
    _, found = replayed(trainer, sample, folder)
    assert found == pytest.approx(sample.rollout_log_probs, abs=1e-4)

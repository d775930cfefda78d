"""Trainer, data source and manifest together, without processes: a run in several lives is one run."""

import random
import types

import numpy as np
import pytest
import torch

from slime.backends.update import train_on_rollouts
from slime.config.training_sections import AlgorithmConfig
from slime.ray.checkpoint_writer import CheckpointWriter
from slime.ray.checkpoints import find
from slime.ray.lineage import Trained
from slime.rollout.convert import to_train_samples
from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.rollout.seeds import seed_process
from slime.utils.parts import declare, files_below
from slime.utils.types import Sample
from tests.backends.rollouts import make_trainer
from tests.tiny import tiny_model_dir

STEPS = 4


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    torch.set_num_threads(1)
    return tiny_model_dir(tmp_path_factory.mktemp("resume") / "model")


def answer(sample):
    """A rollout whose tokens, log-probs and reward come from the global generators."""
    sample.tokens = [5, 6, 7, sample.group_index % 200]
    tokens = [int(token) for token in np.random.randint(3, 250, size=random.randint(2, 6))]
    sample.append_response_tokens(tokens=tokens, log_probs=[-random.random() for _ in tokens])
    sample.status = Sample.Status.COMPLETED
    sample.reward = random.random()
    return sample


def life(model, root, until):
    """One process of a run: from the newest checkpoint to step `until`; returns what it leaves in memory."""
    args = types.SimpleNamespace(save=str(root), load=str(root), n_samples_per_prompt=3)
    schedule = {"lr_decay_style": "cosine", "lr_warmup_iters": 2, "clip_grad": 0.5}
    trainer = make_trainer(model, **schedule)
    source = RolloutDataSourceWithBuffer(args)
    checkpoint = find(root, save=root).checkpoint
    first, trained = 0, Trained()
    if checkpoint is not None:
        first, trained = checkpoint.next_step, checkpoint.trained
        trainer.load(checkpoint.trainer)
        source.load(checkpoint.rollout_id)
    writer = CheckpointWriter(root, keep=1)
    for step in range(first, until):
        seed_process(1, step)
        groups = [
            [answer(sample) if sample.reward is None else sample for sample in group]
            for group in source.get_samples(3)
        ]
        source.add_samples(groups[2:])
        rows = to_train_samples(groups[:2], args)
        train_on_rollouts(trainer, rows, algorithm=AlgorithmConfig(), rollouts_per_step=3)
        torch.rand(3), np.random.rand(), random.random()
        trained = trained.after(rows)
        source.save(step)
        writer.take_position(step, declare(root, [root / "rollout" / f"data_source_{step}.json"]))
        folder = writer.begin(step)
        trainer.save(folder / "trainer")
        parts = declare(root, files_below(folder / "trainer"))
        writer.commit(step, parts, policy_version=step + 1, trained=trained)
    weights = {name: tensor.clone() for name, tensor in trainer.weights()}
    return weights, trained, (torch.rand(1).item(), np.random.rand(), random.random())


@pytest.mark.parametrize("cuts", [[1], [3], [1, 2, 3]])
def test_a_run_in_several_lives_is_the_run_in_one_to_the_last_bit(model, tmp_path, cuts):
    weights, trained, draws = life(model, tmp_path / "straight", STEPS)
    for cut in cuts:
        life(model, tmp_path / "cut", cut)
    found, again, later = life(model, tmp_path / "cut", STEPS)
    assert again == trained and trained.rollouts == 6 * STEPS
    assert all(torch.equal(found[name], weights[name]) for name in weights)
    assert later == draws
    manifests = [find(tmp_path / name, save=None).checkpoint for name in ("straight", "cut")]
    assert manifests[0] is not None and manifests[1] is not None
    assert manifests[0].parts == manifests[1].parts


def test_work_without_a_manifest_is_done_again_and_not_twice(model, tmp_path):
    """A manifest that was never written: with one checkpoint kept, the run starts anew in the same folder."""
    weights, trained, _ = life(model, tmp_path / "straight", STEPS)
    life(model, tmp_path / "torn", 2)
    (tmp_path / "torn" / "step_000001" / "manifest.json").unlink()
    assert find(tmp_path / "torn", save=tmp_path / "torn").checkpoint is None
    found, again, _ = life(model, tmp_path / "torn", STEPS)
    assert again == trained
    assert all(torch.equal(found[name], weights[name]) for name in weights)

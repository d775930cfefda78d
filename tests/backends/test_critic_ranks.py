"""Law 3 across ranks: 2 processes have the values, the steps and the checkpoint of one critic."""

import pytest
import torch

from slime.backends.critic_update import CriticTraining
from slime.backends.torch.ranks import ALONE
from slime.backends.update import train_on_rollouts
from slime.config.training_sections import AlgorithmConfig
from tests.backends.critics import make_critic
from tests.backends.rank_group import run_group
from tests.backends.rollouts import cut, gradients, group_samples, make_trainer, relative_gap

PPO = AlgorithmConfig(advantage_estimator="ppo", gamma=0.97, lambd=0.9)
# With the usual epsilon AdamW blows the rounding of gradients that are almost zero up to whole steps.
SETTINGS = {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 40, "adam_eps": 1e-3}


class Kept:
    """A critic whose last gradient the test reads."""

    def __init__(self, critic):
        self.critic, self.values, self.gradient = critic, critic.values, {}

    def step(self, rows):
        metrics = self.critic.step(rows)
        self.gradient = gradients(self.critic)
        return metrics

    def sleep(self):
        self.critic.sleep()


def update(ranks, folder, root):
    """Values, gradients of actor and critic, the critic's metrics, and the values of what was saved."""
    samples = [row for i, sample in enumerate(group_samples()) for row in cut(sample, 1 + i % 3, 100 * i)]
    trainer = make_trainer(folder, algorithm=PPO, ranks=ranks, **SETTINGS)
    options = {"critic": {"load": str(root / "start")}, "seed": None, "ranks": ranks}
    critic = Kept(make_critic(folder, **options, **SETTINGS))
    values = critic.values(samples)
    found = train_on_rollouts(
        trainer,
        samples,
        algorithm=PPO,
        rollouts_per_step=100,
        critic=CriticTraining(critic=critic, epochs=2),
    )
    critic.critic.save(root / f"by-{ranks.size}")
    critic.critic.save_hf(root / f"hf-{ranks.size}")
    again = make_critic(folder, **options, **SETTINGS)
    again.load(root / f"by-{ranks.size}")
    assert again.values(samples) == critic.values(samples)
    return values, gradients(trainer), critic.gradient, found.critic_steps


def test_law_3_ranks_change_neither_values_nor_gradients(tiny_dir, tmp_path):
    make_critic(tiny_dir).save_hf(tmp_path / "start")
    torch.set_num_threads(1)
    values, actor, critic, steps = update(ALONE, tiny_dir, tmp_path)
    assert any(gradient.abs().max() > 0 for gradient in critic.values())
    for rank in run_group(2, update, tiny_dir, tmp_path):
        for ours, theirs in zip(rank[0], values, strict=True):
            assert ours == pytest.approx(theirs, abs=1e-5)
        assert relative_gap(rank[1], actor) < 1e-5
        assert relative_gap(rank[2], critic) < 1e-5
        for ours, theirs in zip(rank[3], steps, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-6)
    exported = [make_critic(tiny_dir, seed=None, critic={"load": str(tmp_path / f"hf-{n}")}) for n in (1, 2)]
    for left, right in zip(*(critic.values(group_samples()) for critic in exported), strict=True):
        assert left == pytest.approx(right, abs=1e-4)

"""A small critic for the batch of rollouts.py."""

import torch

from slime.backends.torch.critic import TorchCritic
from slime.backends.torch.ranks import ALONE
from slime.config.sections import ModelConfig
from slime.config.training_sections import CriticConfig, TrainConfig


def make_critic(folder, *, model=None, critic=None, value_clip=0.2, seed=7, ranks=ALONE, **train):
    """A critic whose gradients stay readable, with a value head that is not zero (`seed` None leaves it)."""
    config = {"clip_grad": 0.0, "lr": 1e-3, "train_num_threads": 1, "train_precision": "float32"} | train
    made = TorchCritic(
        ModelConfig(hf_checkpoint=str(folder), **(model or {})),
        CriticConfig(**(critic or {})),
        TrainConfig(**config),
        value_clip=value_clip,
        total_steps=10,
        ranks=ranks,
    )
    if seed is not None:
        set_head(made, seed)
    return made


def set_head(critic, seed):
    """Draw a value head."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in critic.named_parameters():
        if name.startswith("score."):
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.2


def weights_of(model):
    """Copies of all parameters by name."""
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

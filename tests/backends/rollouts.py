"""A small GRPO batch and trainers for it."""

import itertools
import random
from dataclasses import replace

from slime.backends.hooks import NO_HOOKS
from slime.backends.torch.ranks import ALONE
from slime.backends.torch.sharding import whole
from slime.backends.torch.trainer import TorchTrainer
from slime.config.sections import ModelConfig
from slime.config.training_sections import AlgorithmConfig, TrainConfig
from slime.train.batch import TrainSample


def make_trainer(
    folder, *, algorithm=None, temperature=1.3, model=None, ranks=ALONE, hooks=NO_HOOKS, **train
):
    """A trainer whose gradients stay readable: no clipping, one thread."""
    config = {"clip_grad": 0.0, "lr": 1e-3, "train_num_threads": 1, "train_precision": "float32"} | train
    return TorchTrainer(
        ModelConfig(hf_checkpoint=str(folder), **(model or {})),
        algorithm or AlgorithmConfig(),
        TrainConfig(**config),
        temperature=temperature,
        total_steps=10,
        ranks=ranks,
        hooks=hooks,
    )


def gradients(trainer):
    return {name: whole(p.grad).clone() for name, p in trainer.named_parameters()}


def relative_gap(left, right):
    """Largest difference of two gradients, relative to the largest entry."""
    scale = max(g.abs().max() for g in right.values())
    return max((left[name] - right[name]).abs().max() / scale for name in right).item()


def group_samples(groups=2, size=3, seed=0):
    """Groups with a common head, tool tokens inside the responses, and unequal rewards."""
    rng = random.Random(seed)
    head = [rng.randrange(259) for _ in range(4)]
    samples = []
    for index in range(groups * size):
        group = index // size
        prompt = [*head, *((17 * group + k) % 259 for k in range(6))]
        response = [rng.randrange(4) for _ in range(rng.randint(3, 9))]
        samples.append(
            TrainSample(
                index=index,
                rollout_id=index,
                group_index=group,
                tokens=tuple(prompt + response),
                response_length=len(response),
                loss_mask=tuple(int(k not in (1, 4)) for k in range(len(response))),
                rollout_log_probs=tuple(-1.0 - 0.1 * k for k in range(len(response))),
                reward=float(index % size == 0) + 0.25 * (index % 2),
            )
        )
    return samples


def cut(sample, pieces, first_index):
    """Siblings that together hold the sample's trained tokens, each behind the whole history before it."""
    bounds = [round(k * sample.response_length / pieces) for k in range(pieces + 1)]
    spans = [(a, b) for a, b in itertools.pairwise(bounds) if a < b]
    return [
        replace(
            sample,
            index=first_index + k,
            tokens=sample.tokens[: sample.prompt_length + stop],
            response_length=stop - start,
            loss_mask=sample.loss_mask[start:stop],
            rollout_log_probs=sample.rollout_log_probs[start:stop],
        )
        for k, (start, stop) in enumerate(spans)
    ]

"""A program: two optimizer steps on a full micro-batch; prints the bytes that its process grew by at most.

python -m tests.train.peak MODEL TOKENS '{"flag_of_the_train_section": value}'
"""

import gc
import json
import random
import sys
import tempfile
from pathlib import Path

import psutil

from slime.backends.torch.trainer import TorchTrainer
from slime.backends.update import train_on_rollouts
from slime.config.sections import ModelConfig
from slime.config.training_sections import AlgorithmConfig, TrainConfig
from slime.train.batch import TrainSample
from tests.tiny import tiny_model_dir


def peak_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def train_twice(folder: Path, tokens: int, train: dict) -> None:
    trainer = TorchTrainer(
        ModelConfig(hf_checkpoint=str(folder)),
        AlgorithmConfig(),
        TrainConfig(**train),
        temperature=1.0,
        total_steps=4,
    )
    draw = random.Random(0)
    samples = [
        TrainSample(
            index=index,
            rollout_id=index,
            group_index=index // 4,
            tokens=tuple(draw.randrange(3, 250) for _ in range(tokens // 4)),
            response_length=tokens // 4 - 8,
            loss_mask=(1,) * (tokens // 4 - 8),
            rollout_log_probs=None,
            reward=float(index % 2),
        )
        for index in range(8)
    ]
    for _ in range(2):
        train_on_rollouts(trainer, samples, algorithm=AlgorithmConfig(), rollouts_per_step=8)


def main(folder: str, tokens: int, train: dict) -> None:
    with tempfile.TemporaryDirectory() as small:
        train_twice(tiny_model_dir(Path(small) / "model"), 64, train | {"max_tokens_per_gpu": 64})
    gc.collect()
    before = psutil.Process().memory_info().rss
    train_twice(Path(folder), tokens, train)
    print(json.dumps({"bytes": peak_bytes() - before}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3]))

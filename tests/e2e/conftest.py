"""Whole runs of `slime train` as a user starts them: own process, tiny model, everything real."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from slime.observability.trackers import read_metrics
from tests.tiny import tiny_model_dir

ROOT = Path(__file__).resolve().parents[2]


@dataclass
class World:
    """A tiny model, prompts, and a folder for runs."""

    folder: Path
    model: Path
    data: Path

    def flags(self, name: str, **extra) -> list[str]:
        flags = {
            "hf-checkpoint": self.model,
            "prompt-data": self.data,
            "apply-chat-template": True,
            "label-key": "label",
            "num-rollout": 2,
            "rollout-batch-size": 4,
            "n-samples-per-prompt": 4,
            "rollout-max-response-len": 8,
            "custom-rm-path": "tests.e2e.hooks.low_bytes",
            "lr": 1e-3,
            "train-precision": "float32",
            "use-dynamic-batch-size": True,
            "max-tokens-per-gpu": 2048,
            "run-dir": self.folder / name,
            "engine-num-threads": 1,
            "train-num-threads": 1,
        }
        flags |= {key.replace("_", "-"): value for key, value in extra.items()}
        words = []
        for key, value in flags.items():
            if value is None or value is False:
                continue
            words += [f"--{key}"] + ([] if value is True else [str(item) for item in _listed(value)])
        return words

    def start(self, name: str, **extra) -> subprocess.Popen:
        """`slime train` in the background, its output in `<name>.log`."""
        log = (self.folder / f"{name}.log").open("w")
        command = [sys.executable, "-m", "slime.cli", "train", *self.flags(name, **extra)]
        env = dict(os.environ) | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT, env=env)

    def train(self, name: str, code: int = 0, **extra) -> str:
        """Run to the end, check the exit code, return the output."""
        process = self.start(name, **extra)
        returned = process.wait(timeout=300)
        text = self.log(name)
        assert returned == code, text
        return text

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def metrics(self, name: str) -> list[dict]:
        return read_metrics(self.folder / name / "metrics.jsonl")

    def rewards(self, name: str) -> list[float]:
        return [row["rollout/raw_reward"] for row in self.metrics(name) if "rollout/raw_reward" in row]


def _listed(value):
    return value if isinstance(value, list | tuple) else [value]


@pytest.fixture(scope="session")
def world(tmp_path_factory) -> World:
    folder = tmp_path_factory.mktemp("world")
    rows = [{"input": [{"role": "user", "content": f"say {n}"}], "label": str(n)} for n in range(12)]
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return World(folder, tiny_model_dir(folder / "model"), data)

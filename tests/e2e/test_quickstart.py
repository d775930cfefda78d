"""The quickstart as a user runs it: real model, real learning. Needs the model (`make test-all`)."""

import subprocess
import sys

import pytest

from slime.observability.report import evaluation_scores
from slime.observability.trackers import read_metrics
from tests.e2e.conftest import ROOT

pytestmark = pytest.mark.slow


def test_held_out_accuracy_at_least_doubles(tmp_path):
    make_data = [sys.executable, "examples/quickstart/make_data.py", "data/quickstart"]
    subprocess.run(make_data, cwd=ROOT, check=True)
    flags = ["--config", "examples/quickstart/config.yaml", "--run-dir", str(tmp_path), "--num-rollout", "16"]
    train = [sys.executable, "-m", "slime.cli", "train", *flags]
    text = subprocess.run(train, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    points = evaluation_scores(read_metrics(tmp_path / "metrics.jsonl"))["held_out"]
    (_, before), (_, after) = points[0], points[-1]
    assert after >= 2 * before and after >= 0.5, text
    assert (tmp_path / "reward.png").is_file()

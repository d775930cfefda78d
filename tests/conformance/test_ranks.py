"""Law 3 over ranks: rollouts cut and dealt over processes give the gradient of whole ones on one."""

import random

import pytest
import torch

from slime.backends.torch.ranks import ALONE
from slime.backends.torch.tiny import write_tiny_model
from slime.backends.update import train_on_rollouts
from slime.train.synthetic import cut_rollouts, synthetic_rollouts
from tests.backends.rank_group import run_group
from tests.backends.rollouts import gradients, make_trainer, relative_gap
from tests.conformance.cases import cases

CASES = {
    name: algorithm
    for name, algorithm in cases().items()
    if algorithm.loss_aggregation != "sample" and algorithm.advantage_estimator != "ppo"
}
FEW = ["gspo, prompt", "reinforce_plus_plus, token", "whitening", "OPSM", "geometric weights"]

PART = 8
"""Cases of one group of processes: each has a minute."""


def whole_and_cut(algorithm):
    """The same rollouts as one row each, and cut and shuffled."""
    samples, rng = synthetic_rollouts(3), random.Random(3)
    shares = algorithm.sibling_reward == "sum"
    rows = cut_rollouts(samples, "uneven", rng, carries_history=True, shares_reward=shares)
    rng.shuffle(rows)
    return samples, rows


def gradients_of(ranks, folder, names):
    """The gradient of one step by case: of whole rollouts on one rank, of cut ones on several."""
    torch.set_num_threads(1)
    found = {}
    for name in names:
        algorithm = CASES[name]
        dynamic = {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 60}
        trainer = make_trainer(folder, algorithm=algorithm, lr=0.0, ranks=ranks, **dynamic)
        rows = whole_and_cut(algorithm)[ranks.size > 1]
        train_on_rollouts(trainer, rows, algorithm=algorithm, rollouts_per_step=100)
        found[name] = gradients(trainer)
    return found


def check(folder, size, names):
    alone = gradients_of(ALONE, folder, names)
    for found in run_group(size, gradients_of, folder, names):
        gaps = {name: relative_gap(found[name], alone[name]) for name in names}
        assert {name: gap for name, gap in gaps.items() if not gap < 1e-5} == {}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    write_tiny_model(folder)
    return folder


def test_law_3_two_ranks_with_cut_rollouts_give_the_gradient_of_one_with_whole_ones(folder):
    check(folder, 2, FEW)


@pytest.mark.slow
@pytest.mark.parametrize("start", range(0, len(CASES), PART))
@pytest.mark.parametrize("size", [2, 4])
def test_law_3_ranks_change_no_gradient_of_any_case(folder, size, start):
    check(folder, size, list(CASES)[start : start + PART])

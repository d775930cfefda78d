"""Law 3 over the whole arithmetic: how rollouts are cut, ordered and packed cannot change a gradient."""

import functools

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slime.backends.critic_update import CriticTraining
from slime.backends.torch.conformance import VARIATIONS, check_invariance
from slime.backends.torch.tiny import write_tiny_model
from slime.backends.update import train_on_rollouts
from slime.train.synthetic import synthetic_rollouts
from tests.backends.critics import make_critic
from tests.backends.rollouts import make_trainer
from tests.conformance.cases import cases

CASES = cases()
ROLLOUTS_PER_STEP = 6


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    write_tiny_model(folder)
    return folder


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


@functools.cache
def models_of(folder, name):
    """The trainer of a case, and its critic where it has one."""
    algorithm, critic = CASES[name], None
    if algorithm.advantage_estimator == "ppo":
        critic = make_critic(folder, lr=0.0, value_clip=algorithm.value_clip)
    return make_trainer(folder, algorithm=algorithm, lr=0.0), critic


def train(algorithm, trainer, critic, rows):
    return train_on_rollouts(
        trainer,
        rows,
        algorithm=algorithm,
        rollouts_per_step=ROLLOUTS_PER_STEP,
        critic=None if critic is None else CriticTraining(critic=critic),
    )


def check(folder, name, seed, variations=VARIATIONS):
    """All variations of one case; only `sample` aggregation may depend on the cut, and must."""
    algorithm = CASES[name]
    trainer, critic = models_of(folder, name)
    found = list(
        check_invariance(
            trainer,
            functools.partial(train, algorithm),
            synthetic_rollouts(seed),
            critic=critic,
            variations=variations,
            shares_reward=algorithm.sibling_reward == "sum",
            depends_on_cut=algorithm.loss_aggregation == "sample",
            seed=seed,
        )
    )
    assert [finding.variation for finding in found] == list(variations)
    assert [finding for finding in found if finding.verdict == "fail"] == []
    return found


@pytest.mark.parametrize("name", CASES)
def test_law_3_no_cut_order_or_packing_changes_a_gradient(tiny_dir, name):
    found = check(tiny_dir, name, seed=1)
    differing = {finding.variation for finding in found if finding.verdict == "by definition"}
    cuts = {variation for variation in VARIATIONS if variation.cuts}
    assert differing == (cuts if CASES[name].loss_aggregation == "sample" else set())


names, seeds = st.sampled_from(list(CASES)), st.integers(0, 2**20)
variations = st.sampled_from([v for v in VARIATIONS if v.pieces == "uneven"])
bounded = functools.partial(settings, deadline=None, suppress_health_check=list(HealthCheck))


@given(names, seeds, variations)
@bounded(max_examples=25)
def test_law_3_holds_for_random_rollouts_and_cuts(tiny_dir, name, seed, variation):
    check(tiny_dir, name, seed, [variation])


@pytest.mark.slow
@given(names, seeds)
@bounded(max_examples=100)
def test_law_3_holds_for_many_rollouts_and_all_variations(tiny_dir, name, seed):
    check(tiny_dir, name, seed)

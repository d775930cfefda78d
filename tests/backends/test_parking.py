"""A trainer that sleeps has its models and moments on the host; awake, it is what it was, to the bit."""

import pytest
import torch

from slime.backends.torch import parking
from slime.backends.torch.parking import Parking
from slime.config.training_sections import AlgorithmConfig
from tests.backends.critics import make_critic
from tests.backends.rank_group import run_group
from tests.backends.rollouts import group_samples, make_trainer
from tests.backends.test_trainer import assert_equal, run, values

KL = AlgorithmConfig(use_kl_loss=True, kl_loss_coef=0.1)
LORA = {"lora_rank": 4, "lora_alpha": 8.0}


@pytest.fixture
def device(monkeypatch):
    """Takes the memory of these models for a device's, which has to be given up."""
    monkeypatch.setattr(parking, "on_host", lambda tensor: False)


def held(tensors):
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def test_parked_tensors_hold_nothing_and_come_back_in_their_storage(device):
    tensor = torch.arange(12.0)
    view, storage = tensor.view(3, 4)[1], tensor.untyped_storage()
    yard = Parking()
    yard.park([tensor, view])
    assert storage.nbytes() == 0
    with yard.lent([view]):
        assert view.tolist() == [4.0, 5.0, 6.0, 7.0]
    assert storage.nbytes() == 0
    yard.restore()
    tensor[4] = -1.0
    assert view[0] == -1.0 and tensor[11] == 11.0


def test_what_changes_while_it_is_lent_is_kept(device):
    tensor, yard = torch.zeros(3), Parking()
    yard.park([tensor])
    with yard.lent([tensor]):
        tensor += 1
    yard.restore()
    assert tensor.tolist() == [1.0, 1.0, 1.0]


def test_what_is_on_the_host_stays_there():
    tensor, yard = torch.ones(3), Parking()
    yard.park([tensor])
    assert tensor.tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("settings", [{}, LORA], ids=["whole", "adapters"])
def test_a_trainer_that_slept_goes_on_as_one_that_did_not(tiny_dir, device, settings):
    sleeper, waker = (make_trainer(tiny_dir, algorithm=KL, **settings) for _ in range(2))
    for seed in range(3):
        run(sleeper, [seed], KL)
        run(waker, [seed], KL)
        sleeper.sleep()
        assert held(parameter for _, parameter in sleeper.named_parameters()) == 0
        assert held(sleeper._models()) == held(sleeper._optimizer.state_tensors().values()) == 0
        with sleeper.present():
            assert_equal(values(sleeper), values(waker))
        assert held(sleeper._models()) == 0
        sleeper.wake()
    assert sleeper.log_probs(group_samples(), reference=True) == waker.log_probs(
        group_samples(), reference=True
    )


def test_a_critic_comes_back_by_itself(tiny_dir, device, tmp_path):
    critic = make_critic(tiny_dir)
    before = critic.values(group_samples())
    critic.sleep()
    assert held(parameter for _, parameter in critic.named_parameters()) == 0
    assert critic.values(group_samples()) == before
    critic.sleep()
    critic.save(tmp_path / "critic")
    critic.sleep()
    critic.load(tmp_path / "critic")
    assert critic.values(group_samples()) == before


def slept(ranks, folder, sleeps):
    parking.on_host = lambda tensor: False
    trainer = make_trainer(folder, ranks=ranks)
    for seed in range(2):
        run(trainer, [seed])
        if sleeps:
            trainer.sleep()
            with trainer.present():
                values(trainer)
            trainer.wake()
    return values(trainer)


def test_shards_of_ranks_are_parked_too(tiny_dir):
    sleepers, wakers = (run_group(2, slept, tiny_dir, sleeps) for sleeps in (True, False))
    assert_equal(sleepers[0], wakers[0])

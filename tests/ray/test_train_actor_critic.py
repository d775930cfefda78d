"""The critic lives beside the actor: trained, saved and restored with it."""

import pytest
import torch

from slime.config import load_config
from slime.errors import CheckpointError
from slime.ray.delivery import TrainerSharing
from slime.ray.train_actor import TrainActor
from tests.backends.rollouts import group_samples
from tests.tiny import tiny_model_dir


@pytest.fixture(scope="module")
def make_actor(tmp_path_factory):
    """A function that starts a train actor in this process; they stop at the end."""
    model = tiny_model_dir(tmp_path_factory.mktemp("models") / "tiny")
    actors = []

    def make(*words):
        config = load_config(
            [
                *("--hf-checkpoint", str(model), "--disable-rollout-global-dataset"),
                *("--rollout-batch-size", "2", "--n-samples-per-prompt", "3", "--num-rollout", "9"),
                *("--rollout-max-response-len", "8", "--num-steps-per-rollout", "2"),
                *("--lr", "1e-3", "--train-precision", "float32", "--train-num-threads", "1", *words),
            ]
        )
        actor = TrainActor(config, config.plan(None))
        actor.start(None, TrainerSharing(shares_memory=True, engine_dtype="float32", sleeps=True))
        actors.append(actor)
        return actor

    yield make
    for actor in actors:
        actor.stop()


PPO = ("--advantage-estimator", "ppo", "--num-critic-only-steps", "1", "--critic-lr", "1e-2")


def actor_weights(actor):
    return {name: tensor.clone() for name, tensor in actor._trainer.weights()}


def critic_weights(actor):
    return {name: tensor.detach().clone() for name, tensor in actor._critic.named_parameters()}


def same(left, right):
    assert left.keys() == right.keys()
    return all(torch.equal(left[name], right[name]) for name in left)


def test_the_actor_is_trained_after_the_warm_up_of_the_critic(make_actor):
    actor = make_actor(*PPO)
    before, critic_before = actor_weights(actor), critic_weights(actor)
    update = actor.train(0, group_samples())
    assert update.steps == [] and len(update.critic_steps) == 2
    assert same(actor_weights(actor), before)
    assert not same(critic_weights(actor), critic_before)
    assert len(actor.train(1, group_samples()).steps) == 2
    assert not same(actor_weights(actor), before)


def test_both_are_restored_exactly(make_actor, tmp_path):
    straight, first = make_actor(*PPO), make_actor(*PPO)
    for step in range(3):
        straight.train(step, group_samples(seed=step))
    for step in range(2):
        first.train(step, group_samples(seed=step))
    first.save(str(tmp_path / "state"))
    second = make_actor(*PPO)
    second.load(str(tmp_path / "state"), None)
    second.train(2, group_samples(seed=2))
    assert same(actor_weights(second), actor_weights(straight))
    assert same(critic_weights(second), critic_weights(straight))


def test_a_checkpoint_without_a_critic_is_refused_unless_only_weights_are_wanted(make_actor, tmp_path):
    other = make_actor()
    other.train(0, group_samples())
    other.save(str(tmp_path / "state"))
    actor = make_actor(*PPO)
    fresh = critic_weights(actor)
    with pytest.raises(CheckpointError, match="holds no critic") as caught:
        actor.load(str(tmp_path / "state"), None)
    assert "--start-rollout-id" in str(caught.value)
    actor.load(str(tmp_path / "state"), 0)
    assert same(actor_weights(actor), actor_weights(other))
    assert same(critic_weights(actor), fresh)


def test_a_restart_takes_the_weights_of_both(make_actor, tmp_path):
    first = make_actor(*PPO)
    first.train(1, group_samples())
    first.save(str(tmp_path / "state"))
    second = make_actor(*PPO)
    second.load(str(tmp_path / "state"), 0)
    assert same(actor_weights(second), actor_weights(first))
    assert same(critic_weights(second), critic_weights(first))


def test_the_critic_is_exported(make_actor, tmp_path):
    actor = make_actor(*PPO)
    actor.train(0, group_samples())
    actor.save_critic(str(tmp_path / "values"))
    again = make_actor(*PPO, "--critic-load", str(tmp_path / "values"))
    assert same(critic_weights(again), critic_weights(actor))

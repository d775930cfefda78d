"""Rollouts that wait for a full step are part of a checkpoint."""

import pytest

from slime.config import load_config
from slime.ray.delivery import TrainerSharing
from slime.ray.train_actor import TrainActor
from tests.backends.rollouts import group_samples
from tests.tiny import tiny_model_dir


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    model = tiny_model_dir(tmp_path_factory.mktemp("models") / "tiny")
    return load_config(
        [
            *("--hf-checkpoint", str(model), "--disable-rollout-global-dataset"),
            *("--rollout-batch-size", "2", "--n-samples-per-prompt", "3", "--num-rollout", "3"),
            *("--rollout-max-response-len", "8", "--global-batch-size", "4", "--incomplete-step", "carry"),
            *("--train-num-threads", "1", "--lr", "1e-3"),
        ]
    )


def started(config):
    actor = TrainActor(config, config.plan(None))
    actor.start(None, TrainerSharing(shares_memory=True, engine_dtype="float32", sleeps=True))
    return actor


def weights(actor):
    return {name: weight.clone() for name, weight in actor._trainer.weights()}


def test_a_run_that_goes_on_from_a_checkpoint_trains_what_waited(config, tmp_path):
    steps = [group_samples(seed=number) for number in range(3)]
    straight, first = started(config), started(config)
    folder = tmp_path / "ckpt" / "step" / "trainer"
    folder.mkdir(parents=True)
    for actor in (straight, first):
        assert actor.train(0, steps[0]).rollout["steps"] == 1.0
    first.save(str(folder))
    resumed = started(config)
    resumed.load(str(folder), None)
    for actor in (straight, resumed):
        updates = [actor.train(number, steps[number]) for number in (1, 2)]
        assert [update.rollout["steps"] for update in updates] == [2.0, 2.0]
        assert sum(step["rollouts"] for update in updates for step in update.steps) == 14.0
    ours, theirs = weights(resumed), weights(straight)
    assert all((ours[name] == theirs[name]).all() for name in theirs)
    fresh = started(config)
    fresh.load(str(folder), 1)
    assert fresh.train(1, steps[1]).rollout["steps"] == 1.0
    for actor in (straight, first, resumed, fresh):
        actor.stop()


def test_the_plan_counts_full_steps_and_tells_what_waits(config):
    plan = config.plan(None)
    assert [plan.actor_steps(done) for done in range(4)] == [0, 1, 3, 5]
    assert plan.optimizer_steps == 5
    assert config.plan(None, 2).optimizer_steps == 2
    assert any("waits for the next rollout step" in line for line in plan.lines())

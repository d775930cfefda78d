"""PPO as a user runs it: the critic warms up, both are saved as one, and a resumed run is the same run."""

import pytest
import torch
from safetensors.torch import load_file

PPO = {
    "advantage_estimator": "ppo",
    "num_critic_only_steps": 1,
    "num_steps_per_rollout": 2,
    "critic_lr": 3e-3,
    "critic_num_epochs": 2,
    "engine_num_threads": 1,
}


def weights(folder):
    found = sorted(folder.rglob("model.safetensors"))
    return {path.relative_to(folder).as_posix(): load_file(path) for path in found}


def assert_equal(left, right):
    assert left.keys() == right.keys()
    for file, tensors in left.items():
        assert all(torch.equal(tensors[name], right[file][name]) for name in tensors), file


@pytest.mark.slow
def test_a_run_warms_the_critic_up_and_resumes_exactly(world):
    save = world.folder / "ppo-ckpt"
    text = world.train(
        "ppo",
        num_rollout=3,
        save=save,
        save_interval=1,
        critic_save=world.folder / "critic-{rollout_id}",
        **PPO,
    )
    assert "4 optimizer steps per rollout step; alone in the first 1 rollout steps" in text
    rows = [row for row in world.metrics("ppo") if "train/critic-value_loss" in row]
    assert ["train/loss" in row for row in rows] == [False, True, True]
    assert all("rollout/explained_variance" in row and "train/critic-grad_norm" in row for row in rows)
    steps = [weights(save / f"step_{step:06d}") for step in range(3)]
    files = list(steps[0])
    assert len(files) == 2 and any("critic" in file for file in files)
    (save / "step_000002").rename(world.folder / "step_000002")
    world.train("ppo", num_rollout=3, save=save, load=save, **PPO)
    assert_equal(weights(save / "step_000002"), steps[2])
    again = world.train("start", num_rollout=1, critic_load=world.folder / "critic-2", **PPO)
    assert "never trained" in again

"""A checkpoint counts only when it is complete."""

import pytest

from slime.errors import CheckpointError
from slime.ray.checkpoints import commit, newest, refuse_later_steps, step_folder


def test_the_newest_complete_checkpoint_is_found(tmp_path):
    for step in (3, 7, 11):
        step_folder(tmp_path, step).mkdir()
    commit(tmp_path, 3, policy_version=4)
    commit(tmp_path, 7, policy_version=8)
    found = newest(tmp_path)
    assert (found.rollout_id, found.policy_version, found.folder.name) == (7, 8, "step_000007")


def test_no_complete_checkpoint_is_an_error_that_lists_what_is_there(tmp_path):
    step_folder(tmp_path, 5).mkdir()
    with pytest.raises(CheckpointError, match="no complete checkpoint .*step_000005"):
        newest(tmp_path)


def test_a_run_that_starts_before_the_checkpoints_of_its_folder_is_refused(tmp_path):
    step_folder(tmp_path, 7).mkdir()
    commit(tmp_path, 7, policy_version=8)
    refuse_later_steps(tmp_path, 8)
    with pytest.raises(CheckpointError, match="holds step_000007 already, .* starts at rollout step 2"):
        refuse_later_steps(tmp_path, 2)

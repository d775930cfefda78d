"""`slime check --arithmetic` on configurations and hooks, right and wrong."""

import pytest

from slime.cli import main

HOOKS = "tests.cli.hooks_for_check"
ADVANTAGES = "--custom-advantage-function-path"
POSTPROCESS = "--rollout-data-postprocess-path"
REWARDS = "--custom-reward-post-process-path"
LOSS = ("--loss-type", "custom_loss", "--custom-loss-function-path")


def check(capsys, *flags):
    code = main(["check", "--arithmetic", *flags])
    return code, capsys.readouterr()


@pytest.mark.parametrize("estimator", ["gspo", "ppo"])
def test_what_holds_says_so_check_by_check(capsys, estimator):
    code, printed = check(capsys, "--advantage-estimator", estimator, "--use-rollout-logprobs")
    assert code == 0
    assert [line[:2] for line in printed.out.splitlines()] == ["ok"] * 9 + ["th"]
    assert "rollouts cut in 5 samples" in printed.out


@pytest.mark.parametrize(
    "flags",
    [
        [ADVANTAGES, f"{HOOKS}.by_rollout", POSTPROCESS, f"{HOOKS}.scaled_by_rollout"],
        ["--custom-pg-loss-reducer-function-path", f"{HOOKS}.longest"],
        [REWARDS, f"{HOOKS}.doubled", "--reward-key", "score"],
        [*LOSS, f"{HOOKS}.likelihood"],
    ],
    ids=["advantages", "reducer", "rewards", "loss"],
)
def test_hooks_that_look_at_rollouts_pass(capsys, flags):
    code, printed = check(capsys, *flags)
    assert (code, printed.out.count("FAIL")) == (0, 0)


def test_a_hook_that_looks_at_rows_fails_with_sample_value_and_remedy(capsys):
    code, printed = check(capsys, ADVANTAGES, f"{HOOKS}.by_row")
    assert code == 1
    failed = [line for line in printed.out.splitlines() if line.startswith("FAIL")]
    assert len(failed) == 4 and all("rollouts cut" in line for line in failed)
    assert "first: rollout 0, sample 0: advantages of the rollout's trained token 0 was" in printed.out
    assert f"change: {ADVANTAGES} {HOOKS}.by_row: make the advantages of a token depend" in printed.out


def test_a_shaping_of_rewards_over_samples_fails_by_name(capsys):
    code, printed = check(capsys, REWARDS, f"{HOOKS}.centred_over_samples")
    assert code == 1
    assert f"change: {REWARDS} {HOOKS}.centred_over_samples: make the advantages" in printed.out


def test_a_loss_that_counts_rows_fails_by_name(capsys):
    code, printed = check(capsys, *LOSS, f"{HOOKS}.mean_of_rows")
    assert code == 1
    failed = [line for line in printed.out.splitlines() if line.startswith("FAIL")]
    assert "micro-batches of 2 rows" in failed[0]
    assert f"change: {LOSS[-1]} {HOOKS}.mean_of_rows: let the loss be a sum over tokens" in printed.out


def test_a_post_processing_that_looks_at_rows_fails_by_name(capsys):
    code, printed = check(capsys, POSTPROCESS, f"{HOOKS}.scaled_by_row")
    assert code == 1
    assert f"change: {POSTPROCESS} {HOOKS}.scaled_by_row: make the advantages" in printed.out


def test_a_hook_of_chance_fails_the_repetition(capsys):
    code, printed = check(capsys, ADVANTAGES, f"{HOOKS}.by_chance")
    assert code == 1
    assert printed.out.startswith("FAIL  the same rows again")
    assert "take the randomness" in printed.out


def test_the_aggregation_that_depends_on_the_cut_says_so(capsys):
    code, printed = check(capsys, "--loss-aggregation", "sample")
    assert code == 0
    assert printed.out.count("depends on the cut by definition") == 4


def test_a_gradient_of_zero_shows_nothing(capsys):
    code, printed = check(capsys, ADVANTAGES, f"{HOOKS}.none")
    assert code == 2 and "nothing to compare" in printed.err


def test_the_same_flags_as_in_training_are_known_and_checked(capsys):
    code, printed = check(capsys, "--tis-clip", "1.5")
    assert code == 2 and "has no effect without --use-tis" in printed.err
    assert main(["check"]) == 2

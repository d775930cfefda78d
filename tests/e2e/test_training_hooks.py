"""Hooks of training, distillation and rollouts that wait, in whole runs."""

import pytest

from slime.config.sections import EngineConfig
from slime.serving.scripted import ScriptedAnswer, start_scripted_server
from tests.tiny import tiny_tokenizer

HOOKS = "tests.backends.hooks"
pytestmark = pytest.mark.slow


def test_hooks_shape_rewards_advantages_and_corrections(world):
    world.train(
        "hooked",
        custom_rm_path="tests.e2e.hooks.low_bytes_by_turn",
        reward_key="parts",
        custom_reward_post_process_path="tests.e2e.hooks.double_rewards",
        custom_advantage_function_path=f"{HOOKS}.rewards_and_kl",
        use_tis=True,
        custom_tis_function_path=f"{HOOKS}.sequence_correction",
        custom_pg_loss_reducer_function_path=f"{HOOKS}.divide_by_longest",
        num_steps_per_rollout=2,
    )
    rows = [row for row in world.metrics("hooked") if "train/loss" in row]
    assert len(rows) == 2
    assert all(0 <= row["rollout/raw_reward"] <= 1 for row in rows)
    assert all(row["train/my_weight"] == pytest.approx(1.0, abs=1e-3) for row in rows)


def test_hooks_convert_samples_and_have_the_last_word(world):
    world.train(
        "converted",
        custom_convert_samples_to_train_data_path="tests.e2e.hooks.halves_with_ids",
        rollout_data_postprocess_path="tests.e2e.hooks.first_tokens_out",
    )
    rows = [row for row in world.metrics("converted") if "train/loss" in row]
    assert [(row["rollout/rollouts"], row["rollout/samples"]) for row in rows] == [(16, 32), (16, 32)]
    sampled = [16 * row["rollout/response_len/mean"] for row in rows]
    assert [row["rollout/tokens"] for row in rows] == pytest.approx([sampled[0], sampled[1] - 16])


def test_a_loss_of_the_users_own_trains_while_rollouts_wait(world):
    text = world.train(
        "custom",
        loss_type="custom_loss",
        custom_loss_function_path=f"{HOOKS}.ppo",
        global_batch_size=10,
        incomplete_step="carry",
        num_rollout=3,
    )
    assert "what fills none waits for the next rollout step" in text
    rows = [row for row in world.metrics("custom") if "train/loss" in row]
    assert [row["rollout/steps"] for row in rows] == [1, 2, 2]
    assert sum(row["train/rollouts"] for row in rows) == 48


def test_a_teacher_behind_a_url_is_asked_and_learned_from(world):
    with start_scripted_server(
        lambda call: ScriptedAnswer(text="a"), tiny_tokenizer(), config=EngineConfig()
    ) as server:
        world.train(
            "taught",
            use_opd=True,
            rm_url=f"{server.url}/generate",
            custom_rm_path="slime.rollout.on_policy_distillation.reward_func",
            custom_reward_post_process_path="slime.rollout.on_policy_distillation.post_process_rewards",
            n_samples_per_prompt=1,
            rollout_batch_size=8,
        )
    rows = [row for row in world.metrics("taught") if "train/loss" in row]
    assert len(rows) == 2 and all(row["rollout/opd_reverse_kl"] != 0 for row in rows)


def test_a_hook_that_breaks_its_contract_ends_the_run_by_name(world):
    text = world.train("broken", code=2, custom_advantage_function_path="tests.e2e.hooks.no_advantages")
    assert "--custom-advantage-function-path (tests.e2e.hooks.no_advantages)" in text
    assert 'did not set rollout_data["advantages"]' in text

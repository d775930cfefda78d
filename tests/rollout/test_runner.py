import asyncio
from types import SimpleNamespace

import pytest

from slime.errors import ConfigError
from slime.rollout.inflight import InFlight
from slime.rollout.outcome import Aborted, Completed, Failed, Truncated
from slime.rollout.runner import Call, RolloutRunner
from slime.utils.types import Sample
from tests.rollout import agent_hooks
from tests.rollout.kit import HOOKS, finished, until


def args(**values):
    defaults = {"rollout_timeout": 20.0, "reward_timeout": 20.0, "custom_rm_path": HOOKS + "reward_by_length"}
    return SimpleNamespace(**(defaults | values))


def runner(settings, **options):
    return RolloutRunner(
        settings,
        generate=agent_hooks.good,
        slots=options.pop("slots", None) or asyncio.Semaphore(64),
        **({"grace": 0.1, "inflight": InFlight()} | options),
    )


def call(**values):
    return Call(**({"step": 3, "sampling_params": {"max_new_tokens": 8}} | values))


def sample(**fields):
    return Sample(**({"group_index": 1, "index": 4, "rollout_id": 4, "prompt": "p"} | fields))


def run(member=None, *, evaluation=False, **values):
    """One rollout with these args."""

    async def main():
        return await runner(args(**values)).run(member or sample(), call(evaluation=evaluation))

    return asyncio.run(main())


def run_group(group, **values):
    async def main():
        return await runner(args(**values)).run_group(group, call())

    return asyncio.run(main())


def test_a_good_rollout_is_completed_and_rewarded():
    rollout = run()
    assert rollout.outcome == Completed()
    assert rollout.valid
    assert rollout.member.reward == 2.0
    assert rollout.timings.generate > 0.0


BROKEN = [
    ("raises", "generate: ValueError", "a broken tool"),
    ("cancels_itself", "generate: HookError", "nobody cancelled it"),
    ("exits", "generate: SystemExit", "SystemExit"),
    ("returns_none", "generate: HookError", "returned None"),
    ("returns_text", "generate: HookError", "returned 'text'"),
    ("returns_nothing", "generate: HookError", "expected a Sample or a non-empty list"),
    ("two_ids", "generate: HookError", "different rollout_id [4, 99]"),
    ("short_mask", "generate: HookError", "loss_mask has length 1, response_length is 2"),
    ("odd_mask", "generate: HookError", "loss_mask holds 2"),
    ("no_log_probs", "generate: HookError", "rollout_log_probs is missing for 2 trained tokens"),
    ("nan_log_probs", "generate: HookError", "rollout_log_probs is nan at response token 1"),
    ("no_tokens", "generate: HookError", "tokens is empty"),
    ("no_prompt", "generate: HookError", "response_length is 2, all of tokens"),
    ("negative_id", "generate: HookError", "tokens holds -2"),
    ("long_response", "generate: HookError", "response_length is 9, tokens has length 3"),
]


@pytest.mark.parametrize(("hook", "reason", "detail"), BROKEN)
def test_law_4_a_broken_hook_makes_a_failed_rollout_without_a_reward(hook, reason, detail):
    rollout = run(custom_generate_function_path=HOOKS + hook)
    assert isinstance(rollout.outcome, Failed)
    assert rollout.outcome.reason == reason
    assert detail in rollout.outcome.detail
    assert hook in rollout.outcome.place
    for broken in rollout.samples:
        assert broken.status is Sample.Status.FAILED
        assert broken.reward is None
        assert broken.remove_sample
        assert detail in broken.metadata["failure"]


def test_a_token_id_outside_the_vocabulary_of_the_model_fails_the_rollout(tmp_path):
    (tmp_path / "config.json").write_text('{"text_config": {"vocab_size": 512}}')
    settings = {"custom_generate_function_path": HOOKS + "large_id"}
    assert run(**settings).valid
    rollout = run(**settings, hf_checkpoint=str(tmp_path))
    assert "tokens holds 512, the vocabulary of the model has 512 ids" in rollout.outcome.detail


@pytest.mark.parametrize(
    ("hook", "reason", "detail"),
    [
        ("reward_none", "no_number", "returned None"),
        ("reward_nan", "no_number", "nan"),
        ("reward_raises", "ConnectionError", "judge is down"),
        ("reward_hangs", "timeout", "did not finish within 0.05 s"),
    ],
)
def test_law_4_a_broken_reward_makes_a_failed_rollout_without_a_reward(hook, reason, detail):
    rollout = run(custom_rm_path=HOOKS + hook, reward_timeout=0.05)
    assert isinstance(rollout.outcome, Failed)
    assert rollout.outcome.reason == f"reward: {reason}"
    assert detail in rollout.outcome.detail
    assert rollout.samples[0].reward is None
    assert rollout.samples[0].tokens == [5, 11, 12]


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize(
    ("flags", "evaluation", "message"),
    [
        (
            {"reward_key": "acc", "eval_reward_key": "score"},
            False,
            "training reads the key 'acc' (--reward-key)",
        ),
        ({"eval_reward_key": "score"}, False, "training reads a number (--reward-key)"),
        (
            {"reward_key": "score", "eval_reward_key": "acc"},
            True,
            "evaluation reads the key 'acc' (--eval-reward-key)",
        ),
    ],
)
def test_a_reward_without_the_key_of_its_mode_fails_the_rollout(flags, evaluation, message, together):
    score = {"score": 0.5}
    settings = {"custom_rm_path": HOOKS + "reward_score", "group_rm": together} | flags

    async def main():
        one = runner(args(**settings))
        return await one.run_group([finished(sample(), reward=score)], call(evaluation=evaluation))

    (rollout,) = asyncio.run(main())
    assert rollout.outcome.reason == "reward: no_key"
    assert message in rollout.outcome.detail
    assert "keys ['score']" in rollout.outcome.detail


def test_a_number_where_a_key_is_set_fails_the_rollout():
    rollout = run(reward_key="acc")
    assert "the reward is 2.0, training reads the key 'acc' (--reward-key)" in rollout.outcome.detail


def test_a_reward_needs_only_the_key_of_its_mode():
    settings = {"reward_key": "acc", "eval_reward_key": "score", "custom_rm_path": HOOKS + "reward_score"}
    assert run(evaluation=True, **settings).valid


def test_law_6_a_hook_that_hangs_ends_at_its_deadline():
    rollout = run(custom_generate_function_path=HOOKS + "hangs", rollout_timeout=0.05)
    assert rollout.outcome.reason == "generate: DeadlineError"
    assert "rollout 4: generate (tests.rollout.agent_hooks.hangs) took longer than 0.05 s" in (
        rollout.outcome.detail
    )


def test_law_6_a_hook_that_swallows_cancellation_ends_at_its_deadline():
    rollout = run(custom_generate_function_path=HOOKS + "swallows_cancellation", rollout_timeout=0.05)
    assert rollout.outcome.reason == "generate: DeadlineError"
    assert "it ignores that" in rollout.outcome.detail


def test_a_rollout_that_the_hook_gives_up_is_aborted_and_not_rewarded():
    rollout = run(custom_generate_function_path=HOOKS + "gives_up")
    assert rollout.outcome == Aborted("sandbox died")
    assert rollout.member.reward is None
    assert rollout.member.remove_sample


def test_law_2_siblings_get_the_ids_of_their_rollout():
    rollout = run(custom_generate_function_path=HOOKS + "fans_out")
    assert rollout.fan_out
    assert [(s.group_index, s.rollout_id, s.index) for s in rollout.samples] == [(1, 4, 4)] * 2
    assert [s.reward for s in rollout.samples] == [3.0, 2.0]
    assert rollout.reward(args()) == 2.5


def test_the_hook_of_a_sample_wins():
    own = sample(generate_function_path=HOOKS + "fans_out_copies")
    assert len(run(own, custom_generate_function_path=HOOKS + "raises").samples) == 3


def test_a_finished_member_is_not_generated_again():
    rollout = run(finished(sample(), reward=0.75), custom_generate_function_path=HOOKS + "raises")
    assert rollout.outcome == Completed()
    assert rollout.member.reward == 0.75


def test_a_finished_member_without_reward_is_rewarded():
    assert run([finished(sample(), reward=None), finished(sample(), reward=0.5)]).samples[0].reward == 2.0


def test_a_reward_that_the_hook_set_is_checked_and_kept():
    assert run(finished(sample(), reward=True)).member.reward == 1.0
    broken = run(finished(sample(), reward=float("inf")))
    assert broken.outcome.reason == "reward: no_number"


def test_truncation_is_an_outcome():
    cut = finished(sample(), status=Sample.Status.TRUNCATED)
    assert run(cut).outcome == Truncated()


def test_sample_hooks_see_step_and_evaluation():
    rollout = run(rollout_sample_hook_path=[HOOKS + "note_step"], evaluation=True)
    assert rollout.member.metadata["seen"] == (3, True)


def test_a_sample_hook_that_raises_fails_the_rollout():
    rollout = run(rollout_sample_hook_path=[HOOKS + "hook_raises"])
    assert rollout.outcome.reason == "sample hooks: RuntimeError"


def test_evaluation_needs_no_tokens_and_is_passed_to_hooks_that_name_it():
    assert run(custom_generate_function_path=HOOKS + "no_tokens", evaluation=True).valid
    seen = run(custom_generate_function_path=HOOKS + "reads_evaluation", evaluation=True)
    assert seen.member.metadata["evaluation"] is True


def test_sampling_parameters_are_a_copy_without_a_seed():
    shared = {"max_new_tokens": 8}

    async def main():
        one = runner(args(custom_generate_function_path=HOOKS + "spoils_params"))
        return await one.run(sample(), call(sampling_params=shared, seed=7))

    assert asyncio.run(main()).member.metadata["params"] == {"max_new_tokens": 8}
    assert shared == {"max_new_tokens": 8}


def test_group_rm_rewards_all_valid_samples_in_one_call():
    settings = {"group_rm": True, "custom_rm_path": HOOKS + "reward_group"}
    group = [sample(index=0), sample(index=1, generate_function_path=HOOKS + "raises"), sample(index=2)]
    first, failed, last = run_group(group, **settings)
    assert first.member.reward == last.member.reward == 2.0
    assert isinstance(failed.outcome, Failed)


def test_group_rm_rewards_the_siblings_of_a_fan_out_in_the_same_call():
    settings = {
        "group_rm": True,
        "custom_rm_path": HOOKS + "reward_group",
        "custom_generate_function_path": HOOKS + "fans_out",
    }
    rollouts = run_group([sample(index=0), sample(index=1)], **settings)
    assert [[sibling.reward for sibling in rollout.member] for rollout in rollouts] == [[4.0, 4.0]] * 2


def test_law_4_a_broken_group_reward_fails_the_whole_group():
    settings = {"group_rm": True, "custom_rm_path": HOOKS + "reward_group_raises"}
    rollouts = run_group([sample(index=0), sample(index=1)], **settings)
    assert [rollout.outcome.reason for rollout in rollouts] == ["reward: ConnectionError"] * 2
    assert all(rollout.member.reward is None for rollout in rollouts)


def test_a_run_without_a_reward_stops_with_the_flag():
    with pytest.raises(ConfigError, match="no reward is configured"):
        run(custom_rm_path=None)


def test_rewards_do_not_hold_a_slot():
    async def main():
        inflight = InFlight()
        settings = args(custom_rm_path=HOOKS + "reward_hangs")
        one = runner(settings, slots=asyncio.Semaphore(1), inflight=inflight)
        tasks = [asyncio.create_task(one.run(sample(index=i, rollout_id=i), call())) for i in range(3)]
        await until(lambda: [e.phase.split()[0] for e in inflight.entries()] == ["reward"] * 3)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        assert inflight.describe() == "nothing is in flight"

    asyncio.run(main())


def test_what_waits_for_a_slot_gives_up_after_an_abort():
    async def main():
        one = runner(args(), slots=asyncio.Semaphore(1), gives_up=lambda: True)
        return await one.run(sample(), call())

    assert isinstance(asyncio.run(main()).outcome, Aborted)


@pytest.mark.parametrize(("retries", "outcome", "tries"), [(0, Failed, 1), (1, Failed, 2), (2, Completed, 3)])
def test_a_failed_rollout_begins_again_from_its_prompt_as_often_as_it_may(retries, outcome, tries):
    agent_hooks.TRIES.clear()
    path = HOOKS + "works_the_third_time"
    (rollout,) = run_group([sample()], custom_generate_function_path=path, rollout_retries=retries)
    assert isinstance(rollout.outcome, outcome)
    assert [0] * tries == agent_hooks.TRIES

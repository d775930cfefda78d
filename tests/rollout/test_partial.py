"""Partial rollouts: what a closing batch interrupts keeps its tokens and is continued in a later step.

Groups 0 and 1 fill the first batch; group 2 is slow, is interrupted there, and is in the second batch.
"""

import asyncio

import pytest

from slime.rollout.accounting import Fate
from slime.rollout.convert import to_train_samples
from slime.rollout.group_run import GroupRun
from slime.rollout.loop import run_blocking
from slime.rollout.outcome import Aborted, Truncated
from slime.rollout.runner import Call
from slime.rollout.sglang_rollout import runner_for
from slime.rollout.stopping import GroupStop, Stop
from slime.serving.scripted import ScriptedAnswer, scripted_logprob
from slime.utils.types import Sample
from tests.rollout import agent_hooks
from tests.rollout.kit import HOOKS, ListSource, engine_args, scripted, state_for, until
from tests.rollout.policies import steps

BUDGET = 100
FLAGS = {"over_sampling_batch_size": 3, "rollout_max_response_len": BUDGET}


def answer(call):
    """Group 2 takes its time in the first version of the weights; it then wants more than its budget."""
    if "p2" not in call.prompt:
        return ScriptedAnswer(token_ids=[70, 71], delay=0.3)
    slow = 0.04 if call.weight_version == "0" else 0.0
    return ScriptedAnswer(token_ids=[72 + number % 9 for number in range(200)], token_latency=slow)


def two_steps(policy="partial", source=None, **values):
    """The run after two steps, and the engine's calls for group 2: (prompt tokens, new tokens allowed)."""
    source = source or ListSource(size=2)
    with scripted(answer) as server, steps(server, source, policy, **(FLAGS | values)) as run:
        run.run(1)
        run.interrupted = [sample for group in source.returned for sample in samples_of(group)]
        run.interrupted = [(s.index, list(s.tokens), s.response_length) for s in run.interrupted]
        run.run(1)
        run.check_books()
        run.calls = [
            (len(call.input_ids), call.params.max_new_tokens)
            for call in server.engine.calls
            if "p2" in call.prompt
        ]
    return run


def samples_of(group):
    return [sample for member in group for sample in (member if isinstance(member, list) else [member])]


def continued(run):
    """The samples of group 2."""
    return [sample for sample in run.rollouts() if sample.group_index == 2]


def test_an_interrupted_rollout_keeps_its_tokens_and_goes_on_within_its_budget():
    run = two_steps()
    assert [index for index, _, _ in run.interrupted] == [4, 5]
    for (_, tokens, kept), sample in zip(run.interrupted, continued(run), strict=True):
        assert 0 < kept < BUDGET
        assert sample.tokens[: len(tokens)] == tokens
        assert sample.response_length == BUDGET
        assert sample.status.value == "truncated"
        assert sample.reward == BUDGET
        assert not sample.remove_sample
    prompt = continued(run)[0].prompt_length
    assert run.calls[:2] == [(prompt, BUDGET)] * 2
    asked = sorted((prompt + kept, BUDGET - kept) for _, _, kept in run.interrupted)
    assert sorted(run.calls[2:]) == asked


def test_law_7_every_token_has_the_version_and_log_prob_with_which_it_was_sampled():
    run = two_steps()
    for (_, _, kept), sample in zip(run.interrupted, continued(run), strict=True):
        spans = [tuple(span) for span in sample.metadata["weight_version_spans"]]
        assert spans == [("0", 0, kept), ("1", kept, BUDGET)]
        assert sample.weight_versions == ["0", "1"]
        assert sample.rollout_log_probs == [scripted_logprob(token) for token in sample.tokens[-BUDGET:]]
        assert sample.loss_mask == [1] * BUDGET
    assert run.outputs[1].metrics["rollout/oldest_token_age"] == 1


def test_the_mask_leaves_out_exactly_the_older_tokens():
    run = two_steps(mask_offpolicy_in_partial_rollout=True)
    for (_, _, kept), sample in zip(run.interrupted, continued(run), strict=True):
        assert sample.loss_mask == [0] * kept + [1] * (BUDGET - kept)
    rows = [row for row in to_train_samples(run.outputs[1].samples, run.args) if row.group_index == 2]
    assert len(rows) == 2
    assert run.outputs[1].metrics["rollout/oldest_token_age"] == 0


def test_the_books_tell_what_is_continued_from_what_begins_again():
    run = two_steps()
    assert run.outputs[0].metrics["rollout/accounting/requeued/continued"] == 2
    assert run.ledger.total.reasons(Fate.REQUEUED).get("begins again", 0) == 0
    assert run.outputs[0].metrics["rollout/wasted_ratio"] == 0


def test_without_partial_rollouts_the_same_group_begins_again():
    run = two_steps("synchronous")
    assert all(kept == 0 for _, _, kept in run.interrupted)
    assert [sample.metadata["weight_version_spans"] for sample in continued(run)] == [[("1", 0, BUDGET)]] * 2
    assert run.outputs[0].metrics["rollout/accounting/requeued/begins again"] == 2
    assert run.outputs[0].metrics["rollout/wasted_ratio"] > 0


def test_the_step_in_which_a_rollout_began_is_noted_once():
    """Group 2 is interrupted in the first step and, since it stays slow, in the second too."""

    def stays_slow(call):
        slow = 0.04 if call.weight_version in ("0", "1") else 0.0
        if "p2" in call.prompt:
            return ScriptedAnswer(token_ids=[72] * 200, token_latency=slow)
        return ScriptedAnswer(token_ids=[70, 71], delay=0.2)

    source = ListSource(size=2)
    with scripted(stays_slow) as server, steps(server, source, "partial", **FLAGS) as run:
        run.run(3)
        run.check_books()
    assert [sample.metadata["start_rollout_id"] for sample in continued(run)] == [0, 0]
    versions = [[span[0] for span in s.metadata["weight_version_spans"]] for s in continued(run)]
    assert versions == [["0", "1", "2"]] * 2
    assert all(sample.response_length == BUDGET for sample in continued(run))
    others = [sample for sample in run.rollouts() if sample.group_index != 2]
    assert all("start_rollout_id" not in sample.metadata for sample in others)


def test_siblings_of_a_fan_out_begin_again_and_finished_ones_go_back_whole():
    """A rollout of several rows has no one place from which it could go on."""
    run = two_steps(custom_generate_function_path=HOOKS + "asks_then_fans_out")
    assert all(kept == 0 for _, _, kept in run.interrupted)
    assert run.outputs[0].metrics["rollout/accounting/requeued/begins again"] == 2
    (members,) = [group for group in run.outputs[1].samples if group[0][0].group_index == 2]
    assert [len(siblings) for siblings in members] == [2, 2]
    for sample in samples_of(members):
        assert sample.metadata["weight_version_spans"] == [("1", 0, BUDGET)]
        assert not sample.remove_sample


def test_a_group_that_is_rewarded_together_gets_its_reward_when_all_of_it_is_there():
    """Rollout 5 of group 2 is done in the first step, and is not generated again."""

    def half_slow(call):
        if call.rid.startswith("5-"):
            return ScriptedAnswer(token_ids=[73, 74])
        return answer(call)

    source = ListSource(size=2)
    flags = FLAGS | {"group_rm": True, "custom_rm_path": HOOKS + "reward_group"}
    agent_hooks.SEEN.clear()
    with scripted(half_slow) as server, steps(server, source, "partial", **flags) as run:
        run.run(1)
        assert [sample.reward for sample in source.returned[0]] == [None, None]
        run.run(1)
        run.check_books()
        asked = [call.rid.split("-")[0] for call in server.engine.calls]
    assert asked.count("5") == 1
    assert asked.count("4") == 2
    assert [sample.reward for sample in continued(run)] == [2.0, 2.0]
    assert continued(run)[1].metadata["weight_version_spans"] == [("0", 0, 2)]


@pytest.mark.parametrize("policy", ["partial", "synchronous"])
def test_a_finished_surplus_group_is_not_generated_again(policy):
    def quick(call):
        return ScriptedAnswer(token_ids=[70, 71])

    with scripted(quick) as server, steps(server, ListSource(size=2), policy, **FLAGS) as run:
        run.run(4)
        run.check_books()
        asked = [call.rid.split("-")[0] for call in server.engine.calls]
        back = len(run.source.returned)
    assert len(asked) - len(set(asked)) <= run.ledger.total.reasons(Fate.REQUEUED).get("begins again", 0)
    assert len(run.trained()) == 8
    assert back <= 1


def stopped(hook, reason, when=lambda engine: engine.stats.decode_tokens >= 3):
    """A rollout that was stopped for this reason at this time, as its group, and the number of its calls."""
    text = "abcdefgh" if hook.endswith("tool") else "abcdefgh" * 50
    policy = lambda call: ScriptedAnswer(text=text, token_latency=0.05)  # noqa: E731
    with scripted(policy) as server:
        args = engine_args(server.url, custom_generate_function_path=HOOKS + hook)
        state_for(args)
        sample = Sample(group_index=0, index=0, rollout_id=0, prompt="p")

        async def main():
            stop = GroupStop()
            call = Call(step=3, sampling_params={"max_new_tokens": 400})
            running = asyncio.create_task(runner_for(args).run_group([sample], call, stop))
            await until(lambda: when(server.engine))
            await stop.stop(reason, 10.0)
            return await running, stop

        rollouts, stop = run_blocking(main())
        fresh = [Sample(index=0, rollout_id=0, prompt="p")]
        return GroupRun(fresh=fresh, tickets=[0], rollouts=rollouts, stop=stop), len(server.engine.calls)


@pytest.mark.parametrize(("reason", "outcome"), [(Stop.CONTINUE, Aborted), (Stop.CUT, Truncated)])
def test_a_hook_that_goes_on_behind_refused_calls_has_not_completed(reason, outcome):
    run, calls = stopped("three_turns_and_completed", reason)
    (rollout,) = run.rollouts
    assert calls == 1 and isinstance(rollout.outcome, outcome)
    assert ("cut" in rollout.samples[0].metadata) == (reason is Stop.CUT)
    if reason is Stop.CONTINUE:
        (back,) = run.resumable()
        assert back.response_length == 0


@pytest.mark.parametrize("reason", Stop)
@pytest.mark.parametrize("hook", ["sandbox_dies_in_a_tool", "gives_up_in_a_tool", "sandbox_dies_in_a_call"])
def test_law_4_what_a_hook_gave_up_stays_given_up_when_its_group_is_stopped(hook, reason):
    in_a_tool = {} if hook.endswith("call") else {"when": lambda engine: agent_hooks.IN_A_TOOL}
    agent_hooks.IN_A_TOOL.clear()
    run, _ = stopped(hook, reason, **in_a_tool)
    (rollout,) = run.rollouts
    assert isinstance(rollout.outcome, Aborted)
    assert rollout.samples[0].remove_sample and rollout.samples[0].reward is None
    (back,) = run.resumable()
    says_why = hook != "gives_up_in_a_tool"
    assert (back.response_length == 0) == (says_why or reason is Stop.CUT)


@pytest.mark.parametrize(("hook", "wrong"), [("half_built", "loss_mask"), ("no_log_probs_yet", "log_probs")])
def test_law_4_what_was_cut_half_built_fails_and_does_not_train(hook, wrong):
    run, _ = stopped(hook, Stop.CUT)
    (rollout,) = run.rollouts
    assert rollout.outcome.reason == "generate: HookError"
    assert wrong in rollout.outcome.detail and hook in rollout.outcome.place

import asyncio
import copy
import json
import logging
import re
from collections import Counter
from types import SimpleNamespace

import pytest

from slime.errors import (
    ConfigError,
    EngineError,
    HookError,
    RolloutFailedError,
)
from slime.rollout.accounting import Fate, Ledger
from slime.rollout.base_types import RolloutFnTrainOutput
from slime.rollout.convert import to_train_samples
from slime.rollout.data_source import RolloutDataSource, RolloutDataSourceWithBuffer
from slime.rollout.group_run import GroupRun
from slime.rollout.inflight import IN_FLIGHT
from slime.rollout.loop import run_blocking
from slime.rollout.runner import Call
from slime.rollout.scheduling import Batch
from slime.rollout.sglang_rollout import (
    GenerateState,
    abort,
    generate,
    generate_and_rm,
    generate_and_rm_group,
    generate_rollout,
    get_model_url,
    output_of,
    runner_for,
)
from slime.rollout.stopping import Stop
from slime.serving.scripted import ScriptedAnswer, scripted_logprob
from slime.utils.types import Sample
from tests.rollout import agent_hooks
from tests.rollout.kit import HOOKS, ListSource, completed_rollout, engine_args, scripted, state_for, until


@pytest.fixture(autouse=True)
def forget_state():
    yield
    GenerateState.clear_instance()


def step(server, source, number=0, **values):
    """One rollout step."""
    args = engine_args(server.url, n_samples_per_prompt=source.size, **values)
    state_for(args)
    return generate_rollout(args, number, source)


def count(output, name):
    return output.metrics.get(f"rollout/accounting/{name}", 0)


def test_a_step_gives_the_wanted_groups_rewarded_and_ready_to_train():
    with scripted() as server:
        output = step(server, ListSource(size=3), rollout_batch_size=4)
    assert isinstance(output, RolloutFnTrainOutput)
    assert [[s.index for s in group] for group in output.samples] == [
        [0, 1, 2],
        [3, 4, 5],
        [6, 7, 8],
        [9, 10, 11],
    ]
    rows = to_train_samples(output.samples, SimpleNamespace())
    assert all(row.votes and row.reward == row.response_length for row in rows)
    assert count(output, "trained") == count(output, "submitted") == 12
    assert output.metrics["perf/rollout_phase/generate/max"] > 0.0


def test_a_step_that_is_to_replay_routes_begins_only_where_engines_tell_them():
    with scripted() as server:
        with pytest.raises(EngineError, match="has no routes of experts, which --use-rollout-routing-replay"):
            step(server, ListSource(size=2), use_rollout_routing_replay=True)
        assert not server.engine.calls


def test_law_1_the_training_ids_are_the_engines_answer_behind_the_prompt():
    with scripted(lambda call: ScriptedAnswer(token_ids=[70 + call.number % 7, 71])) as server:
        output = step(server, ListSource())
        calls = {call.input_ids for call in server.engine.calls}
    for group in output.samples:
        for sample in group:
            assert tuple(sample.tokens[:-2]) in calls
            assert sample.loss_mask == [1, 1]
            assert sample.rollout_log_probs == [scripted_logprob(token) for token in sample.tokens[-2:]]


def test_law_2_every_row_carries_its_ids_under_fan_out():
    with scripted() as server:
        output = step(server, ListSource(), custom_generate_function_path=HOOKS + "fans_out")
    rows = to_train_samples(output.samples, SimpleNamespace())
    assert [row.index for row in rows] == list(range(8))
    assert [(row.group_index, row.rollout_id) for row in rows] == [
        (group, 2 * group + slot) for group in range(2) for slot in range(2) for _ in range(2)
    ]
    assert count(output, "trained") == 4


def test_law_4_failed_rollouts_stay_in_their_group_without_vote_or_reward():
    source = ListSource(size=4, prompt="fail{}")
    with scripted() as server:
        output = step(
            server, source, custom_generate_function_path=HOOKS + "mixed", max_failed_rollout_ratio=0.9
        )
    rows = to_train_samples(output.samples, SimpleNamespace())
    assert [row.votes for row in rows] == [True, False] * 4
    assert all(row.reward != row.reward for row in rows if not row.votes)
    assert count(output, "failed/generate: ValueError") == 4
    assert count(output, "trained") == 4


def test_law_5_the_identity_holds_over_steps_with_filter_failures_and_surplus():
    source = ListSource(size=4, prompt="fail{}")
    with scripted() as server:
        args = engine_args(
            server.url,
            rollout_batch_size=2,
            over_sampling_batch_size=5,
            n_samples_per_prompt=4,
            custom_generate_function_path=HOOKS + "mixed",
            dynamic_sampling_filter_path=HOOKS + "drop_first_groups",
            max_failed_rollout_ratio=0.9,
        )
        ledger = state_for(args).ledger
        outputs = [generate_rollout(args, number, source) for number in range(3)]
    assert all(len(output.samples) == 2 for output in outputs)
    assert outputs[0].metrics["rollout/dynamic_filter/drop_filter"] == 3
    ledger.check(0)
    assert ledger.total.submitted == sum(count(output, "submitted") for output in outputs)


def test_law_6_a_hanging_rollout_is_reported_and_ended_and_the_step_goes_on(caplog):
    def hang(sample):
        if sample.index == 1:
            sample.generate_function_path = HOOKS + "hangs"

    source = ListSource(size=3, prepare=hang)
    with scripted() as server, caplog.at_level(logging.WARNING):
        output = step(server, source, rollout_timeout=0.3, custom_generate_function_path=HOOKS + "good")
    assert [s.status.value for s in output.samples[0]] == ["completed", "failed", "completed"]
    assert "rollout 1" in caplog.text
    assert "took longer than 0.3 s" in caplog.text
    assert IN_FLIGHT.describe() == "nothing is in flight"


CUT_HOOKS = {
    "good": "Completed",
    "default_generate": "Truncated",
    "half_built": "Failed",
    "sandbox_dies_in_a_call": "Aborted",
    "hangs": "Aborted",
}
"""One rollout each of a group that is cut, the last before it has a slot; the cut ends all but the first."""


@pytest.mark.parametrize(("dropped", "trained"), [(False, 1), (True, 0)])
def test_every_rollout_that_a_cut_ended_is_counted_and_those_that_train_apart(dropped, trained):
    group = ListSource(size=len(CUT_HOOKS)).get_samples(1)[0]
    for sample, hook in zip(group, CUT_HOOKS, strict=True):
        sample.generate_function_path = HOOKS + hook
    run = GroupRun(fresh=copy.deepcopy(group), tickets=list(range(len(group))))

    async def cut_group(args, engine):
        call = Call(step=0, sampling_params={"max_new_tokens": 400})
        running = asyncio.create_task(runner_for(args).run_group(group, call, run.stop))
        await until(lambda: engine.stats.decode_tokens >= 9)
        await run.stop.stop(Stop.CUT, 10.0)
        return await running

    with scripted(lambda call: ScriptedAnswer(text="abcdefgh" * 50, token_latency=0.05)) as server:
        args = engine_args(server.url, sglang_server_concurrency=3)
        state = state_for(args)
        run.rollouts = run_blocking(cut_group(args, server.engine))
    assert [type(rollout.outcome).__name__ for rollout in run.rollouts] == list(CUT_HOOKS.values())
    sample = Sample(index=99, rollout_id=99)
    other = GroupRun(fresh=[sample], tickets=[99], rollouts=[completed_rollout(sample)])
    groups = [other] if dropped else [other, run]
    batch = Batch(step=0, groups=groups, seen=[run], drops=Counter(), account=Ledger().close(), age=0)
    counts = [
        (metrics["rollout/cut"], metrics["rollout/cut_trained"])
        for metrics in (output_of(batch, state).metrics, output_of(batch, state).metrics)
    ]
    assert counts == [(4, trained), (0, trained)]


@pytest.mark.parametrize(
    ("flags", "last"),
    [
        (
            {"custom_generate_function_path": HOOKS + "hangs_in_a_tool", "rollout_timeout": 4.0},
            r"call 1 \(0-\w+\) ended by stop after ",
        ),
        (
            {"custom_rm_path": HOOKS + "reward_hangs", "reward_timeout": 0.5},
            r"call 1 \(0-\w+\) ended by stop after ",
        ),
        ({"turn_timeout": 0.3}, r"call 1 \(0-\w+\) ended by DeadlineError after \d+\.\d s, \d+\.\d s ago"),
        (
            {"custom_generate_function_path": HOOKS + "hangs", "rollout_timeout": 0.5},
            "no engine call has ended",
        ),
    ],
)
def test_law_6_what_passes_a_deadline_tells_the_engine_call_that_ended_last(flags, last, caplog):
    answer = ScriptedAnswer(text="a", hang="turn_timeout" in flags)
    with scripted(lambda call: answer) as server, caplog.at_level(logging.WARNING):
        args = engine_args(server.url, **flags)
        state_for(args)
        sample = Sample(group_index=0, index=0, rollout_id=0, prompt="p")
        failed = run_blocking(generate_and_rm(args, sample, {"max_new_tokens": 4}))
    assert re.search(f"last event: .*{last}", failed.metadata["failure"])
    assert re.search(f"rollout 0 .*is past its deadline: (?s:.*)last event: .*{last}", caplog.text)


def test_the_surplus_is_aborted_at_the_engine_and_its_prompts_come_again():
    def slow_third(call):
        return ScriptedAnswer(hang=True) if "p2" in call.prompt else ScriptedAnswer(text="a")

    source = ListSource()
    with scripted(slow_third) as server:
        output = step(server, source, rollout_batch_size=2, over_sampling_batch_size=3)
        aborted = {event.partition(":")[2] for event in server.engine.events}
        hanging = {call.rid for call in server.engine.calls if "p2" in call.prompt}
    assert [group[0].group_index for group in output.samples] == [0, 1]
    assert aborted == hanging
    assert len(hanging) == 2
    assert [group[0].prompt for group in source.returned] == ["p2"]


def test_law_5_surplus_with_fan_out_goes_through_the_shipped_data_source(tmp_path):
    """Groups 0-4 finish about together: two are trained in each step, none is generated twice."""
    data = tmp_path / "prompts.jsonl"
    data.write_text("".join(json.dumps({"input": f"p{number}"}) + "\n" for number in range(50)))
    with scripted() as server:
        args = engine_args(
            server.url,
            prompt_data=str(data),
            over_sampling_batch_size=5,
            custom_generate_function_path=HOOKS + "fans_out",
        )
        ledger = state_for(args).ledger
        source = RolloutDataSourceWithBuffer(args)
        outputs = [generate_rollout(args, number, source) for number in range(3)]
    trained = [group[0][0].group_index for output in outputs for group in output.samples]
    assert len(trained) == len(set(trained)) == 6
    assert all(len(siblings) == 2 for o in outputs for group in o.samples for siblings in group)
    assert sorted(trained + [group[0][0].group_index for group in nested(source.buffer)]) == sorted(
        set(range(source.sample_group_index)) - {group[0].group_index for group in flat(source.buffer)}
    )
    ledger.check(0)


def test_a_surplus_needs_a_source_that_takes_groups_back():
    with scripted() as server:
        args = engine_args(server.url, over_sampling_batch_size=3)
        state_for(args)
        with pytest.raises(ConfigError, match=r"--over-sampling-batch-size, --data-source-path: 3 groups"):
            generate_rollout(args, 0, RolloutDataSource(args))
        args.over_sampling_batch_size = 2
        generate_rollout(args, 0, ListSource())
        assert server.engine.calls[0].prompt.startswith("p")


def test_law_5_a_soak_with_faults_of_every_kind_loses_nothing():
    def sometimes_busy(call):
        if call.number % 19 == 5:
            return ScriptedAnswer(error=(503, "busy"))
        if call.number % 97 == 60:
            return ScriptedAnswer(error=(500, "broken"))
        return ScriptedAnswer(token_ids=[70] * (1 + call.number % 5), delay=0.002 * (call.number % 7))

    source = ListSource(size=8)
    with scripted(sometimes_busy) as server:
        args = engine_args(
            server.url,
            rollout_batch_size=8,
            over_sampling_batch_size=12,
            n_samples_per_prompt=8,
            rollout_timeout=2.0,
            reward_timeout=2.0,
            max_failed_rollout_ratio=1.0,
            custom_generate_function_path=HOOKS + "moody",
            custom_rm_path=HOOKS + "moody_reward",
            dynamic_sampling_filter_path="slime.rollout.filter_hub.dynamic_sampling_filters."
            "check_reward_nonzero_std",
        )
        ledger = state_for(args).ledger
        outputs = [generate_rollout(args, number, source) for number in range(4)]
        idle = run_blocking(GenerateState(args).engine.loads())[0]
    trained = [group[0].group_index for output in outputs for group in output.samples]
    assert len(trained) == len(set(trained)) == 32
    back = {group[0].group_index for group in source.returned}
    assert back.isdisjoint(trained)
    assert ledger.total.in_flight == 0
    assert sum(ledger.total.reasons(Fate.FAILED).values()) > 10
    assert (idle["num_running_reqs"], idle["num_waiting_reqs"]) == (0, 0)
    assert IN_FLIGHT.describe() == "nothing is in flight"
    assert run_blocking(number_of_tasks()) == 1
    rows = [row for output in outputs for row in to_train_samples(output.samples, SimpleNamespace())]
    assert all(row.reward in (0.0, 1.0) for row in rows if row.votes)


async def number_of_tasks():
    return len(asyncio.all_tasks())


def nested(buffer):
    return [group for group in buffer if isinstance(group[0], list)]


def flat(buffer):
    return [group for group in buffer if not isinstance(group[0], list)]


def test_two_hundred_rollouts_are_in_flight_together():
    def waits(call):
        return ScriptedAnswer(text="a", delay=0.5)

    with scripted(waits) as server:
        output = step(server, ListSource(size=4), rollout_batch_size=50)
    assert sum(map(len, output.samples)) == 200


def test_a_busy_engine_is_asked_again():
    def busy_at_first(call):
        return ScriptedAnswer(error=(429, "busy")) if call.number < 3 else ScriptedAnswer(text="a")

    with scripted(busy_at_first) as server:
        output = step(server, ListSource())
    assert count(output, "failed") == 0


def test_an_engine_that_fails_stops_the_step_with_its_message():
    with (
        scripted(lambda call: ScriptedAnswer(error=(500, "out of memory"))) as server,
        pytest.raises(RolloutFailedError, match=r"x generate: EngineError.*500: out of memory"),
    ):
        step(server, ListSource())


def test_an_engine_that_dies_while_it_generates_stops_the_step():
    dying = ScriptedAnswer(text="abcdef", token_latency=0.01, die_after=2)
    with (
        scripted(lambda call: dying) as server,
        pytest.raises(RolloutFailedError, match="generate: EngineUnavailableError"),
    ):
        step(server, ListSource())


def test_hooks_of_the_full_batch_see_it_and_all_groups():
    agent_hooks.SEEN.clear()
    with scripted() as server:
        output = step(
            server,
            ListSource(),
            rollout_sample_filter_path=HOOKS + "remove_last",
            rollout_all_samples_process_path=HOOKS + "remember",
            dynamic_sampling_filter_path=HOOKS + "drop_first_groups",
        )
    assert count(output, "filtered/remove_sample") == 2
    assert agent_hooks.SEEN == [[2] * 5]


def test_a_filter_that_raises_is_named():
    with (
        scripted() as server,
        pytest.raises(HookError, match=r"--dynamic-sampling-filter-path .* on group 0: raised KeyError"),
    ):
        step(server, ListSource(), dynamic_sampling_filter_path=HOOKS + "filter_raises")


@pytest.mark.parametrize("name", ["custom_generate_function_path", "dynamic_sampling_filter_path"])
def test_a_hook_that_does_not_import_stops_before_anything_is_drawn(name):
    source = ListSource()
    with scripted() as server, pytest.raises(HookError, match="no attribute 'nowhere'"):
        step(server, source, **{name: HOOKS + "nowhere"})
    assert source.given == 0


def test_without_an_engine_address_the_args_are_named():
    with pytest.raises(ConfigError, match="sglang_router_ip"):
        get_model_url(SimpleNamespace())


def test_urls_of_named_models():
    args = SimpleNamespace(
        sglang_router_ip="10.0.0.1", sglang_router_port=7, sglang_model_routers={"judge": ("10.0.0.2", 8)}
    )
    assert get_model_url(args, "judge", "/v1/models") == "http://10.0.0.2:8/v1/models"
    assert get_model_url(args) == "http://10.0.0.1:7/generate"


def direct(server, work, **values):
    """Run a public coroutine function as a plugin would."""
    args = engine_args(server.url, **values)
    state_for(args)
    return run_blocking(work(args))


def fresh(index=0):
    return Sample(group_index=0, index=index, prompt="p")


def test_plugins_can_call_the_pieces():
    async def use(args):
        params = GenerateState(args).sampling_params
        one = await generate(args, fresh(), dict(params))
        two = await generate_and_rm(args, fresh(), params)
        group = await generate_and_rm_group(args, [fresh(0), fresh(1)], params)
        return one, two, group

    with scripted(lambda call: ScriptedAnswer(token_ids=[70, 71])) as server:
        one, two, group = direct(server, use)
    assert one.reward is None
    assert two.reward == 2.0
    assert [sample.rollout_id for sample in group] == [0, 1]


def test_a_direct_caller_gets_failures_as_status_and_broken_contracts_as_errors():
    with scripted() as server:
        failed = direct(
            server,
            lambda args: generate_and_rm(args, fresh(), {"max_new_tokens": 4}),
            custom_generate_function_path=HOOKS + "raises",
        )
        assert failed.status is Sample.Status.FAILED
        with pytest.raises(HookError, match="different rollout_id"):
            direct(
                server,
                lambda args: generate_and_rm(args, fresh(), {"max_new_tokens": 4}),
                custom_generate_function_path=HOOKS + "two_ids",
            )


def test_abort_ends_what_runs_and_what_waits():
    async def use(args):
        group = [fresh(index) for index in range(3)]
        params = GenerateState(args).sampling_params
        running = asyncio.create_task(generate_and_rm_group(args, group, params))
        await until(lambda: len(server.engine.calls) == 2)
        assert await abort(args, 0) == []
        return await running

    with scripted(lambda call: ScriptedAnswer(hang=True)) as server:
        samples = direct(server, use, sglang_server_concurrency=2)
        assert len(server.engine.calls) == 2
    assert [sample.status for sample in samples] == [Sample.Status.ABORTED] * 3


def test_the_state_is_one_a_process_and_follows_its_args():
    first = engine_args("http://127.0.0.1:1")
    state = GenerateState(first)
    assert GenerateState(first) is state
    assert GenerateState(SimpleNamespace(**vars(first))) is state
    changed = GenerateState(engine_args("http://127.0.0.1:2"))
    assert changed is not state
    assert changed.engine.url == "http://127.0.0.1:2"

"""Rollouts that go on over steps, on a real HTTP server: versions, bounds, accounting, and a clean end."""

import asyncio
import random

import pytest

from slime.errors import ConfigError, DeadlineError
from slime.rollout.convert import oldest_version
from slime.rollout.data_source import RolloutDataSource
from slime.rollout.fully_async_rollout import generate_rollout_fully_async
from slime.rollout.groups import flatten
from slime.rollout.inflight import IN_FLIGHT
from slime.rollout.loop import run_blocking
from slime.rollout.session import SESSION
from slime.rollout.sglang_rollout import GenerateState
from slime.serving.scripted import ScriptedAnswer
from slime.utils.types import Sample
from tests.rollout.kit import ListSource, engine_args, scripted, state_for
from tests.serving.wire import wait_for


@pytest.fixture(autouse=True)
def forget_session():
    yield
    run_blocking(SESSION.close())
    SESSION.version = None
    SESSION._handed_out.clear()
    GenerateState.clear_instance()


def heavy_tailed(seed=0):
    rng = random.Random(seed)

    def policy(call):
        return ScriptedAnswer(text="abcd", token_latency=min(0.004 * rng.paretovariate(1.0), 0.1))

    return policy


def args_for(server, source, **values):
    args = engine_args(server.url, n_samples_per_prompt=source.size, rollout_batch_size=4, **values)
    state_for(args)
    return args


def update(server, version):
    """What a driver does when weights change: tell, change, tell."""
    run_blocking(SESSION.before_update())
    server.engine.pause("in_place")
    server.engine.set_weight_version(str(version))
    server.engine.resume()
    run_blocking(SESSION.weights_changed(version))


@pytest.mark.parametrize("bound", [1, 3])
def test_tokens_are_no_older_than_the_bound_and_every_rollout_trains_once(bound):
    source, trained = ListSource(size=2), []
    with scripted(heavy_tailed()) as server:
        args = args_for(server, source, max_staleness=bound)
        server.engine.set_weight_version("0")
        for step in range(8):
            output = generate_rollout_fully_async(args, step, source)
            samples = list(flatten(output.samples))
            assert step - oldest_version(samples) <= bound
            assert output.metrics["rollout/oldest_token_age"] == step - oldest_version(samples)
            trained += [sample.index for sample in samples]
            update(server, step + 1)
    assert len(trained) == len(set(trained)) == 8 * 8


def test_tokens_on_both_sides_of_an_update_keep_their_own_versions():
    source = ListSource(size=1)
    with scripted(lambda call: ScriptedAnswer(text="abcdefgh", token_latency=0.05)) as server:
        args = args_for(server, source, max_staleness=4)
        server.engine.set_weight_version("0")

        async def changes():
            loop = asyncio.get_running_loop()
            first = loop.run_in_executor(None, generate_rollout_fully_async, args, 0, source)
            while (now := server.engine.stats).running < 4 or now.decode_tokens < 2 * now.running:
                await asyncio.sleep(0.005)
            server.engine.pause("in_place")
            await loop.run_in_executor(None, update, server, 1)
            return await first

        samples = list(flatten(asyncio.run(changes()).samples))
    for sample in samples:
        spans = sample.metadata["weight_version_spans"]
        assert [version for version, _, _ in spans] == ["0", "1"]
        assert spans[0][1] == 0 and spans[0][2] == spans[1][1] and spans[1][2] == sample.response_length
        assert oldest_version([sample]) == 0


def test_closing_the_session_puts_everything_in_flight_back_and_leaves_nothing():
    source = ListSource(size=2)
    with scripted(heavy_tailed()) as server:
        args = args_for(server, source)
        output = generate_rollout_fully_async(args, 0, source)
        state = GenerateState(args)
        run_blocking(SESSION.close())
        wait_for(lambda: server.engine.stats.running == server.engine.stats.waiting == 0)
    gone = {sample.group_index for sample in flatten(output.samples)}
    back = {sample.group_index for sample in flatten(source.returned)}
    assert gone | back == set(range(source.given)) and not gone & back
    assert state.ledger.total.in_flight == 0 and len(IN_FLIGHT) == 0


def test_a_checkpoint_holds_the_groups_that_are_out():
    source = ListSource(size=2)
    with scripted(heavy_tailed()) as server:
        args = args_for(server, source)
        for step in range(2):
            generate_rollout_fully_async(args, step, source)

        async def snapshot():
            return [SESSION.unfinished(step) for step in (0, 1)]

        after_first, after_second = run_blocking(snapshot())
    second = {sample.group_index for sample in flatten(after_first)}
    assert len(second - {sample.group_index for sample in flatten(after_second)}) == 4
    assert all(sample.status.value != "aborted" for sample in flatten(after_second))


def test_the_version_is_asked_for_where_nobody_tells_it():
    source = ListSource()
    with scripted() as server:
        server.engine.set_weight_version("7")
        generate_rollout_fully_async(args_for(server, source), 7, source)
    assert SESSION.version == 7


def test_another_data_source_while_rollouts_are_in_flight_is_an_error():
    source = ListSource()
    with scripted() as server:
        args = args_for(server, source)
        generate_rollout_fully_async(args, 0, source)
        with pytest.raises(ConfigError, match="another data source"):
            generate_rollout_fully_async(args, 1, ListSource())


def test_a_source_that_takes_nothing_back_is_refused_before_anything_runs():
    with scripted() as server:
        args = args_for(server, ListSource())
        with pytest.raises(ConfigError, match="cannot take groups back"):
            generate_rollout_fully_async(args, 0, RolloutDataSource(args))
        assert server.engine.calls == []


def test_a_loop_that_never_tells_of_new_weights_ends_with_what_it_waits_for():
    source = ListSource()
    with scripted() as server:
        good = "tests.rollout.agent_hooks.good"  # asks no engine, so that only the wait is long
        limits = {"rollout_timeout": 1.0, "custom_generate_function_path": good}
        args = args_for(server, source, max_staleness=1, **limits)
        server.engine.set_weight_version("0")
        for step in range(2):
            generate_rollout_fully_async(args, step, source)
        with pytest.raises(DeadlineError, match=r"(?s)newer than version 0.*weights_changed"):
            generate_rollout_fully_async(args, 2, source)


def test_failed_rollouts_of_a_batch_that_was_handed_out_begin_again_after_a_resume():
    source = ListSource(size=3, prompt="p{} fail")
    with scripted() as server:
        path = "tests.rollout.agent_hooks.mixed"
        args = args_for(server, source, custom_generate_function_path=path, max_failed_rollout_ratio=1.0)
        output = generate_rollout_fully_async(args, 0, source)

        async def snapshot():
            return SESSION.unfinished(-1)

        held = {sample.index: sample for sample in flatten(run_blocking(snapshot()))}
    failed = [sample for sample in flatten(output.samples) if sample.status is Sample.Status.FAILED]
    assert failed
    for sample in failed:
        assert held[sample.index].status is Sample.Status.PENDING and not held[sample.index].remove_sample

"""`--sglang-server-concurrency` is for each engine, on a router before two of them."""

import asyncio

import pytest

from slime.rollout.fully_async_rollout import generate_rollout_fully_async
from slime.rollout.loop import run_blocking
from slime.rollout.session import SESSION
from slime.rollout.sglang_rollout import GenerateState, generate, generate_rollout
from slime.rollout.state import slots_of
from tests.rollout.kit import ListSource, engine_args, state_for
from tests.serving.routing import background_router, engines

OF_ONE, ENGINES = 4, 2


class Meeting:
    """Rollouts that wait until so many are in flight as all engines together may have."""

    def __init__(self):
        self.now = self.most = 0
        self.complete = asyncio.Event()

    def enter(self):
        self.now += 1
        self.most = max(self.most, self.now)
        if self.now == OF_ONE * ENGINES:
            self.complete.set()


MEETINGS = []


async def meets(args, sample, sampling_params):
    meeting = MEETINGS[0]
    meeting.enter()
    await meeting.complete.wait()
    await asyncio.sleep(0.05)  # one too many would enter now
    answer = await generate(args, sample, sampling_params)
    meeting.now -= 1
    return answer


@pytest.fixture(autouse=True)
def forget():
    MEETINGS[:] = [Meeting()]
    yield
    run_blocking(SESSION.close())
    SESSION.version = None
    GenerateState.clear_instance()


@pytest.mark.parametrize("function", [generate_rollout, generate_rollout_fully_async])
def test_each_engine_has_its_slots(function):
    with engines(ENGINES) as servers, background_router(servers, policy="round_robin") as router:
        args = engine_args(
            router.url,
            rollout_batch_size=8,
            rollout_timeout=10.0,
            max_failed_rollout_ratio=0.0,
            sglang_server_concurrency=OF_ONE,
            rollout_num_engines=ENGINES,
            custom_generate_function_path=f"{__name__}.meets",
        )
        state_for(args)
        output = function(args, 0, ListSource(size=2))
        run_blocking(SESSION.close())
        assert all(server.engine.calls for server in servers)
    assert len(output.samples) == 8
    assert not any(sample.remove_sample for group in output.samples for sample in group)
    assert MEETINGS[0].most == OF_ONE * ENGINES


def test_one_address_alone_is_one_engine():
    args = engine_args("http://127.0.0.1:1", sglang_server_concurrency=3)
    assert slots_of(args) == 3
    args.rollout_num_engines = 0  # a router where others register engines
    assert slots_of(args) == 3


def test_slots_follow_the_engines_that_a_manager_is_connected_to():
    args = engine_args("http://127.0.0.1:1", sglang_server_concurrency=3)
    first = GenerateState(args)
    args = engine_args("http://127.0.0.1:1", sglang_server_concurrency=3, rollout_num_engines=2)
    assert GenerateState(args) is not first

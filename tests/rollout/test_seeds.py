import random

import numpy as np
import pytest

from slime.rollout.seeds import seed_process
from slime.rollout.sglang_rollout import GenerateState, generate_rollout
from tests.rollout import agent_hooks
from tests.rollout.kit import HOOKS, ListSource, engine_args, scripted, state_for


@pytest.fixture(autouse=True)
def forget_state():
    yield
    GenerateState.clear_instance()


def step(server, source, **values):
    """One rollout step."""
    args = engine_args(server.url, n_samples_per_prompt=source.size, **values)
    state_for(args)
    return generate_rollout(args, 0, source)


def seeds_of_a_step(hook=None, wanted=2, **values):
    """Prompt -> seeds of its calls, in order, in a step of groups of one rollout."""
    with scripted() as server:
        step(
            server,
            ListSource(size=1),
            custom_generate_function_path=hook,
            rollout_batch_size=wanted,
            **values,
        )
        calls = list(server.engine.calls)
    by_prompt = {}
    for call in calls:
        by_prompt.setdefault(call.prompt, []).append(call.params.sampling_seed)
    return by_prompt


@pytest.mark.parametrize(("hook", "asked"), [("asks_three_times", 3), ("asks_by_rollout", 2)])
def test_each_engine_call_of_a_rollout_has_a_seed_of_its_own_that_a_repeat_gives_again(hook, asked):
    seeds = seeds_of_a_step(HOOKS + hook)
    every = [seed for calls in seeds.values() for seed in calls]
    assert len(every) == len(set(every)) == 2 * asked
    assert {prompt: sorted(calls) for prompt, calls in seeds_of_a_step(HOOKS + hook).items()} == {
        prompt: sorted(calls) for prompt, calls in seeds.items()
    }


def test_a_rollout_of_one_call_has_the_seed_of_its_index():
    seeds = seeds_of_a_step()
    assert sorted(seeds.values()) == [[42 * 1_000_003], [42 * 1_000_003 + 1]]


def test_a_try_after_a_failure_has_other_seeds_that_a_repeat_gives_again():
    def asked():
        agent_hooks.TRIES.clear()
        return seeds_of_a_step(HOOKS + "fails_behind_two_calls", wanted=1, rollout_retries=2)

    (seeds,) = asked().values()
    assert len(seeds) == len(set(seeds)) == 6
    assert seeds[0] == 42 * 1_000_003
    assert list(asked().values()) == [seeds]


def test_a_step_draws_the_same_from_global_generators_whatever_was_drawn_before():
    def draws(step):
        seed_process(1234, step)
        return random.random(), float(np.random.rand())

    first = draws(3)
    random.random()
    np.random.rand(7)
    assert draws(3) == first
    assert draws(4) != first

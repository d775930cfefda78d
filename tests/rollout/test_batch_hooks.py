import pytest

from slime.errors import DeadlineError, HookError
from slime.rollout.sglang_rollout import GenerateState, generate_rollout
from tests.rollout import agent_hooks
from tests.rollout.kit import HOOKS, ListSource, engine_args, scripted, state_for

FILTER = "dynamic_sampling_filter_path"
FULL = ("rollout_sample_filter_path", "rollout_all_samples_process_path")


@pytest.fixture(autouse=True)
def forget_state():
    yield
    GenerateState.clear_instance()


def step(server, source, **values):
    """One rollout step."""
    args = engine_args(server.url, n_samples_per_prompt=source.size, **values)
    state_for(args)
    return generate_rollout(args, 0, source)


@pytest.mark.parametrize(
    ("dest", "hook", "what"),
    [(FILTER, "filter_exits", "SystemExit"), (FILTER, "filter_stops", "StopIteration")]
    + [(dest, "batch_exits", "SystemExit") for dest in FULL],
)
def test_a_batch_hook_that_exits_is_named_and_the_loop_lives_on(dest, hook, what):
    flag = "--" + dest.replace("_", "-")
    with scripted() as server:
        with pytest.raises(HookError, match=rf"{flag} \(\S*{hook}\).* {what}"):
            step(server, ListSource(), **{dest: HOOKS + hook})
        assert len(step(server, ListSource()).samples) == 2


@pytest.mark.parametrize(
    ("dest", "hook"),
    [(FILTER, "filter_blocks"), *((dest, hook) for dest in FULL for hook in ("batch_blocks", "batch_hangs"))],
)
def test_law_6_a_batch_hook_that_hangs_ends_at_its_deadline(dest, hook):
    flag = "--" + dest.replace("_", "-")
    try:
        with scripted() as server, pytest.raises(DeadlineError, match=rf"{flag} \(\S*{hook}\) took longer"):
            good = HOOKS + "good"  # asks no engine, so that only the hook is slow
            limits = {"rollout_timeout": 0.3, "custom_generate_function_path": good}
            step(server, ListSource(), **limits, **{dest: HOOKS + hook})
    finally:
        agent_hooks.RELEASE.set()
        agent_hooks.RELEASE.clear()

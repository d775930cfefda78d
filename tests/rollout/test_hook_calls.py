"""Law 6 for the functions that see whole steps: while one hangs it is named, and it ends at its deadline."""

import contextlib
import re
import threading
import time
from types import SimpleNamespace

import pytest

from slime.errors import DeadlineError, HookError
from slime.ray.rollout_manager import RolloutManager
from slime.rollout.convert import to_train_samples
from slime.rollout.hook_calls import call_in_time
from slime.rollout.inflight import IN_FLIGHT
from slime.rollout.log_hooks import EVALUATIONS, ROLLOUTS, has_logged
from slime.rollout.loop import run_blocking
from slime.rollout.sglang_rollout import GenerateState, generate_rollout
from slime.utils.types import Sample
from tests.rollout.kit import ListSource, engine_args, finished, scripted, state_for

SECONDS = 0.5
RELEASE = threading.Event()
HANGS = f"{__name__}.hangs"


def hangs(*values):
    RELEASE.wait(30)


class Hangs(ListSource):
    """A data source that saves and loads nothing, for ever."""

    def save(self, rollout_id):
        hangs()

    load = save


@pytest.fixture(autouse=True)
def forget():
    RELEASE.clear()
    yield
    RELEASE.set()
    GenerateState.clear_instance()


@contextlib.contextmanager
def named_while_it_hangs(name):
    """The body ends by a deadline that names `name`, and the table of what is in flight did so before."""
    found, over = [], threading.Event()

    def look():
        while not found and not over.is_set():
            found.extend(line for line in IN_FLIGHT.describe().splitlines() if re.search(name, line))
            time.sleep(0.01)

    looking = threading.Thread(target=look)
    looking.start()
    try:
        with pytest.raises(DeadlineError, match=rf"{name} took longer than {SECONDS:g} s"):
            yield
    finally:
        over.set()
        looking.join()
    assert found and "deadline in" in found[0]
    assert IN_FLIGHT.describe() == "nothing is in flight"


def flag(dest, path=HANGS):
    return rf"--{dest.replace('_', '-')} \({re.escape(path)}\)"


@pytest.mark.parametrize(
    "dest", ["custom_reward_post_process_path", "custom_convert_samples_to_train_data_path"]
)
def test_a_hook_that_makes_rows_or_rewards_of_a_step(dest):
    args = SimpleNamespace(rollout_timeout=SECONDS, **{dest: HANGS})
    sample = finished(Sample(group_index=0, index=0, rollout_id=0))
    with named_while_it_hangs(flag(dest)):
        to_train_samples([[sample]], args)


@pytest.mark.parametrize("dest", [ROLLOUTS, EVALUATIONS])
def test_a_hook_that_logs(dest):
    args = SimpleNamespace(rollout_timeout=SECONDS, **{dest: f"{__name__}.{dest}"})
    with named_while_it_hangs(flag(dest, f"{__name__}.{dest}")):
        has_logged(args, dest, *([3, args, [], {}, 1.0] if dest == ROLLOUTS else [3, args, {}, {}]))


def custom_rollout_log_function_path(rollout_id, args, samples, extra_metrics, seconds):
    hangs()


def custom_eval_rollout_log_function_path(rollout_id, args, data, extra_metrics):
    hangs()


@pytest.mark.parametrize(
    "dest",
    [
        "dynamic_sampling_filter_path",
        "rollout_sample_filter_path",
        "rollout_all_samples_process_path",
    ],
)
def test_a_filter(dest):
    with scripted() as server:
        flags = {"custom_generate_function_path": "tests.rollout.agent_hooks.good", dest: HANGS}
        args = engine_args(server.url, rollout_timeout=SECONDS, **flags)
        state_for(args)
        with named_while_it_hangs(flag(dest)):
            generate_rollout(args, 0, ListSource())


def manager(tmp_path, overlaps):
    """One that is asked for its data source only."""
    args = SimpleNamespace(
        save=str(tmp_path), load=None, rollout_timeout=SECONDS, data_source_path=f"{__name__}.Hangs"
    )
    made = RolloutManager(SimpleNamespace(args=lambda: args, overlaps=overlaps))
    made._source = Hangs()
    return made


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("method", ["save", "load"])
def test_a_data_source_that_saves_or_loads(tmp_path, method, overlaps):
    made = manager(tmp_path, overlaps)
    with named_while_it_hangs(flag("data_source_path", f"{__name__}.Hangs")):
        getattr(made, method)(4)


def test_a_hook_may_use_the_loop_of_rollouts_and_gives_its_value():
    async def one():
        return 1

    assert call_in_time(lambda: run_blocking(one()), seconds=20, what="it", place="here") == 1


def test_a_hook_that_ends_the_process_is_named_and_other_errors_pass():
    with pytest.raises(HookError, match="it raised SystemExit"):
        call_in_time(exit, seconds=20, what="it", place="here")
    with pytest.raises(ZeroDivisionError):
        call_in_time(lambda: 1 // 0, seconds=20, what="it", place="here")

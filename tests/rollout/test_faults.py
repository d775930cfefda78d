"""The fault table: what goes wrong in a rollout, and what becomes of it, under every policy.

A fault strikes the rollouts whose id is 4 modulo 9, the middle one of every third group. The rest of the run
must not notice: law 4 (no reward), law 5 (no prompt lost or trained twice), law 6 (told by rollout id).
"""

import contextlib
import logging
import re
import resource
import threading
import time
from dataclasses import dataclass

import pytest

from slime.errors import DataError, RolloutFailedError
from slime.rollout.accounting import Fate
from slime.rollout.events import EventLog, read_events
from slime.rollout.inflight import IN_FLIGHT
from slime.rollout.loop import run_blocking
from slime.rollout.session import SESSION
from slime.serving.scripted import ScriptedAnswer, start_scripted_server
from tests.rollout import agent_hooks
from tests.rollout.kit import HOOKS, ListSource, scripted, tokenizer
from tests.rollout.policies import POLICIES, SEEN, steps

DEADLINE = 1.0
"""Seconds that rollout and reward get where a fault is a hang."""
REPORT_SECONDS = 10.0
STRUCK = 4


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What strikes, and what is declared to come of it.

    Attributes:
        generate, reward: hook of the struck rollouts.
        engine: the engine's answer to each try of the struck rollouts, the last for ever.
        reason: under which they are counted as failed; None where the run gets over it.
        message: what the log says besides the rollout.
        seconds: until the fault can be known.
    """

    generate: str | None = None
    reward: str | None = None
    engine: tuple[ScriptedAnswer, ...] = ()
    reason: str | None
    message: str
    seconds: float = 0.0


GOOD = ScriptedAnswer(token_ids=[70, 71])
FAULTS = {
    # a reward that does not judge
    "reward raises": Fault(reward="reward_raises", reason="reward: ConnectionError", message="judge is down"),
    "reward is NaN": Fault(reward="reward_nan", reason="reward: no_number", message="returned nan"),
    "reward is None": Fault(reward="reward_none", reason="reward: no_number", message="returned None"),
    "reward hangs": Fault(
        reward="reward_hangs",
        reason="reward: timeout",
        message="did not finish within 1 s",
        seconds=DEADLINE,
    ),
    # a generate hook that breaks
    "hook raises": Fault(generate="raises", reason="generate: ValueError", message="a broken tool"),
    "hook hangs": Fault(
        generate="hangs",
        reason="generate: DeadlineError",
        message="took longer than 1 s",
        seconds=DEADLINE,
    ),
    "hook returns a wrong type": Fault(
        generate="returns_text", reason="generate: HookError", message="returned 'text', expected a Sample"
    ),
    "hook swallows its cancellation": Fault(
        generate="swallows_cancellation",
        reason="generate: DeadlineError",
        message="took longer than 1 s",
        seconds=DEADLINE,
    ),
    "hook cancels itself": Fault(
        generate="cancels_itself", reason="generate: HookError", message="nobody cancelled it"
    ),
    "hook ends the process": Fault(
        generate="exits", reason="generate: SystemExit", message="raised SystemExit"
    ),
    "hook breaks its samples": Fault(
        generate="short_mask", reason="generate: HookError", message="loss_mask has length 1"
    ),
    "hook gives up": Fault(generate="gives_up", reason="aborted: sandbox died", message="sandbox died"),
    # an engine that fails
    "engine answers 500": Fault(
        engine=(ScriptedAnswer(error=(500, "out of memory")),),
        reason="generate: EngineError",
        message="answered 500: out of memory",
    ),
    "engine answers 400": Fault(
        engine=(ScriptedAnswer(error=(400, "no such thing")),),
        reason="generate: EngineRequestError",
        message="answered 400: no such thing",
    ),
    "engine is busy for good": Fault(
        engine=(ScriptedAnswer(error=(429, "busy")),),
        reason="generate: EngineUnavailableError",
        message=r"answered 429: busy \(6 tries\)",
    ),
    "engine is busy for a while": Fault(
        engine=(*[ScriptedAnswer(error=(429, "busy"))] * 3, GOOD), reason=None, message=""
    ),
    "engine does not answer": Fault(
        generate="default_generate",
        engine=(ScriptedAnswer(hang=True),),
        reason="generate: DeadlineError",
        message="no answer within 1 s|took longer than 1 s",
        seconds=DEADLINE,
    ),
}


SLOW = ("hook swallows its cancellation", "engine does not answer")
SPARED = ("partial", "ahead", "waits")
"""Policies whose slowest tests are marked slow."""
LONG = [pytest.param(p, marks=[pytest.mark.slow] if p in SPARED else []) for p in POLICIES]


def is_struck(rollout_id):
    return rollout_id % 9 == STRUCK


def tells_of_struck(message):
    found = re.search(r"rollout (\d+)", message)
    return found is not None and is_struck(int(found[1]))


def source_of(fault, size=3):
    def strike(sample):
        if is_struck(sample.rollout_id):
            sample.generate_function_path = fault.generate and HOOKS + fault.generate
            sample.custom_rm_path = fault.reward and HOOKS + fault.reward

    return ListSource(size=size, prepare=strike)


def answers(fault):
    """The engine's side of a fault."""
    tries = {}

    def answer(call):
        rollout_id = int(call.rid.split("-")[0])
        if not fault.engine or not is_struck(rollout_id):
            return GOOD
        number = tries[call.rid] = tries.get(call.rid, -1) + 1
        return fault.engine[min(number, len(fault.engine) - 1)]

    return answer


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        pytest.param(name, policy, marks=[pytest.mark.slow] if policy in SPARED and name in SLOW else [])
        for name in FAULTS
        for policy in POLICIES
    ],
)
def test_a_fault_ends_its_rollout_with_its_reason_and_the_run_goes_on(name, policy, caplog):
    fault, begun = FAULTS[name], time.time()
    limits = dict.fromkeys(("rollout_timeout", "reward_timeout"), fault.seconds or 20.0)
    if fault.seconds:  # the others ask no engine, so that the deadline is short for the struck alone
        limits["custom_generate_function_path"] = HOOKS + "good"
    with (
        scripted(answers(fault)) as server,
        caplog.at_level(logging.WARNING),
        steps(server, source_of(fault), policy, sglang_server_concurrency=24, **limits) as run,
    ):
        run.run(3)
        run.check_books()
        failed = run.ledger.total.reasons(Fate.FAILED)
    assert set(failed) == ({fault.reason} if fault.reason else set()), caplog.text
    struck = [sample for sample in run.rollouts() if is_struck(sample.rollout_id)]
    assert struck
    for sample in run.rollouts():
        voids = is_struck(sample.rollout_id) and fault.reason is not None
        assert (sample.reward is None) == sample.remove_sample == voids
        if voids:
            assert re.search(fault.message, sample.metadata.get("failure") or sample.metadata["abort_reason"])
    if fault.reason is not None:
        told = [
            record.created
            for record in caplog.records
            if re.search(fault.message, record.getMessage()) and tells_of_struck(record.getMessage())
        ]
        assert told, caplog.text
        assert min(told) - begun < fault.seconds + REPORT_SECONDS


STUCK = re.compile(
    r"stuck: rollout \d+ \(group \d+\): generate in .*blocks_once"
    r".* event loop at .*agent_hooks.py:\d+ in blocks_once"
)


class Told(logging.Handler):
    """Lets the hook that blocks the event loop go on once the log has it."""

    def emit(self, record):
        if STUCK.search(record.getMessage()):
            agent_hooks.TOLD.append(record)


@pytest.fixture
def told():
    for of_before in (agent_hooks.BLOCKED, agent_hooks.TOLD):
        of_before.clear()
    handler = Told()
    logging.getLogger().addHandler(handler)
    yield
    logging.getLogger().removeHandler(handler)


@pytest.mark.usefixtures("told")
@pytest.mark.parametrize("policy", LONG)
def test_a_hook_that_blocks_the_event_loop_is_told_with_its_place_while_it_blocks(policy, caplog):
    """Nobody can end it from inside, and nothing is lost by it."""
    fault = Fault(generate="blocks_once", reason=None, message="")
    with (
        scripted() as server,
        caplog.at_level(logging.WARNING),
        steps(server, source_of(fault), policy, rollout_timeout=1.0, rollout_retries=1) as run,
    ):
        run.run(3)
        run.check_books()
    assert STUCK.search(caplog.text)


@pytest.mark.parametrize("policy", POLICIES)
def test_an_engine_that_fails_for_all_ends_the_run_with_the_counts_by_reason(policy):
    broken = ScriptedAnswer(error=(500, "out of memory"))
    with (
        scripted(lambda call: broken) as server,
        steps(server, ListSource(size=3), policy, max_failed_rollout_ratio=0.5) as run,
    ):
        with pytest.raises(
            RolloutFailedError, match=r"x generate: EngineError, e.g. rollout \d+ in .*500: out of memory"
        ):
            run.run(1)
        check_all_accounted(run)


class EndsAfter(ListSource):
    """A data set without repetition."""

    def __init__(self, prompts):
        super().__init__(size=3, prompts=prompts)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_data_source_that_runs_empty_ends_the_run_after_all_that_it_had(policy):
    with scripted() as server, steps(server, EndsAfter(5), policy) as run:
        run.run(2)
        with pytest.raises(
            DataError, match=r"rollout step 2: the data source has no more prompts: 1 of 2 groups"
        ):
            run.run(1)
        check_all_accounted(run)
    assert len(run.trained()) == 4
    assert len(run.source.returned) == 1


class Breaks(ListSource):
    """Raises at the third call of `get_samples`."""

    calls = 0

    def get_samples(self, count):
        self.calls += 1
        if self.calls == 3:
            raise ConnectionError("the database is gone")
        return super().get_samples(count)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_data_source_that_raises_ends_the_run_with_its_error_and_gets_all_back(policy):
    with scripted() as server, steps(server, Breaks(size=3), policy) as run:
        with pytest.raises(ConnectionError, match="the database is gone"):
            run.run(4)
        check_all_accounted(run)


class Blocks(ListSource):
    """The third call of `get_samples` waits for a lock that the test holds."""

    def __init__(self):
        super().__init__(size=3)
        self.calls, self.may_go_on = 0, threading.Event()

    def get_samples(self, count):
        self.calls += 1
        if self.calls == 3:
            assert self.may_go_on.wait(30)
        return super().get_samples(count)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_data_source_that_blocks_is_told_by_its_name_and_loses_nothing(policy):
    source = Blocks()
    with scripted() as server, steps(server, source, policy) as run:
        found = []

        def look():
            while source.calls < 3 or "data source" not in IN_FLIGHT.describe():
                time.sleep(0.01)
            found.append(IN_FLIGHT.describe())
            source.may_go_on.set()

        looking = threading.Thread(target=look, daemon=True)
        looking.start()
        run.run(4)
        looking.join(10)
        check_all_accounted(run)
    assert "giving" in found[0]


class TakesNothingBack(ListSource):
    """Refuses the third group."""

    def add_samples(self, groups):
        if any(sample.group_index == 3 for group in groups for sample in group):
            raise OSError("disk full")
        super().add_samples(groups)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_group_that_the_data_source_refuses_is_named_and_the_others_go_back(policy, caplog):
    """Groups 2-5 hang at the engine; under the policies without surplus the step ends by its own error."""

    def hangs(call):
        return ScriptedAnswer(hang=True) if re.search("p[2-5]", call.prompt) else GOOD

    source = TakesNothingBack(size=3)
    with (
        scripted(hangs) as server,
        caplog.at_level(logging.ERROR),
        steps(server, source, policy, over_sampling_batch_size=4, sglang_server_concurrency=12) as run,
        contextlib.suppress(OSError),
    ):
        run.run(1)
        run.close()
    assert "group 3, rollouts [9, 10, 11], cannot go back to the data source: disk full" in caplog.text
    assert 2 in [group[0].group_index for group in source.returned]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_full_disk_below_the_event_log_ends_the_run_and_all_prompts_are_there(
    policy, tmp_path, monkeypatch
):
    path = tmp_path / "events.jsonl"
    log = EventLog(path)
    monkeypatch.setattr(SESSION, "log", log)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with scripted() as server, steps(server, ListSource(size=3), policy) as run:
        run.run(1)
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 1000, hard))
        try:
            with pytest.raises(
                DataError, match=r"events.jsonl: the event log cannot be written: File too large"
            ):
                run.run(20)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        check_all_accounted(run)
    assert next(event["event"] for event in read_events(path)) == "log"


@pytest.mark.parametrize("policy", POLICIES)
def test_an_engine_that_is_killed_and_restarted_costs_no_prompt(policy):
    """It dies in a call; another one at its address answers when it is asked again."""
    servers = []

    def answer(call):
        died = len(servers) == 1 and call.number == 10
        return ScriptedAnswer(token_ids=[70, 71, 72], token_latency=0.01, die_after=1 if died else None)

    with (
        revived(answer, servers) as server,
        steps(server, ListSource(size=3), policy, rollout_retries=6, rollout_timeout=20.0) as run,
    ):
        run.state_backoff(0.3)
        run.run(4)
        run.check_books()
        assert len(servers) == 2
        assert run.ledger.total.reasons(Fate.FAILED) == {}


@pytest.mark.parametrize("policy", POLICIES)
def test_an_engine_that_is_killed_in_an_update_costs_no_prompt(policy):
    """It dies between the news that weights change and the news that they have; what ran begins again."""
    servers = []
    slow = ScriptedAnswer(token_ids=[70, 71, 72], token_latency=0.02)
    with (
        revived(lambda call: slow, servers) as server,
        steps(server, ListSource(size=3), policy, rollout_retries=6, rollout_timeout=20.0) as run,
    ):
        run.state_backoff(0.3)
        run.run(2)
        run_blocking(SESSION.before_update())
        server.current.kill()
        server.revive(weight_version="2")
        run_blocking(SESSION.weights_changed(2))
        run.version = 2
        run.run(2)
        run.check_books()
        assert run.ledger.total.reasons(Fate.FAILED) == {}


class Revived:
    """Scripted engines at one address, one after the other died."""

    def __init__(self, answer, servers):
        self._answer, self._servers = answer, servers
        self._lock = threading.Lock()
        self._start(0, "0")

    @property
    def current(self):
        return self._servers[-1]

    @property
    def engine(self):
        return self.current.engine

    @property
    def url(self):
        return self.current.url

    def revive(self, weight_version):
        """A new engine at the old address."""
        self.current.stop()
        self._start(int(self.url.rpartition(":")[2]), weight_version)

    def _start(self, port, weight_version):
        server = start_scripted_server(self._answer, tokenizer(), port=port)
        server.engine.set_weight_version(weight_version)
        killed = server.engine.on_death

        def on_death():
            killed()
            threading.Thread(target=self.revive, args=(server.engine.weight_version,)).start()

        server.engine.on_death = on_death
        self._servers.append(server)


@contextlib.contextmanager
def revived(answer, servers):
    server = Revived(answer, servers)
    try:
        yield server
    finally:
        server.current.stop()


def check_all_accounted(run):
    """As `Steps.check_books` for a run that ended early: what was judged in the last step is in no batch."""
    run.close()
    run.ledger.check(0)
    trained, back = run.trained(), [group[0].group_index for group in run.source.returned]
    judged = [group for groups in SEEN for group in groups]
    lost = set(range(run.source.given)) - set(judged) - set(back)
    assert len(set(judged + back)) == len(judged + back)
    assert set(trained) <= set(judged)
    ended = run.ledger.total.total(Fate.FAILED) + run.ledger.total.total(Fate.FILTERED)
    assert len(lost) * run.source.size <= ended

import re
import threading
import time

from slime.rollout.inflight import InFlight, Watchdog
from slime.utils.request_scope import RequestScope


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def test_entries_live_as_long_as_their_work():
    inflight = InFlight()
    with inflight.track("rollout 1", "queued"):
        assert len(inflight) == 1
    assert inflight.describe() == "nothing is in flight"


def test_the_table_names_phase_age_and_deadline():
    clock = Clock()
    inflight = InFlight(clock)
    with inflight.track("rollout 1 (group 0)", "queued") as entry:
        clock.now = 2.0
        entry.enter("generate in my.hook", 10.0)
        clock.now = 5.0
        assert inflight.describe() == (
            "rollout 1 (group 0): generate in my.hook for 3.0 s, deadline in 7.0 s"
        )


def test_law_6_the_table_and_the_watchdog_tell_the_engine_call_that_ended_last():
    async def abort(rid):
        raise AssertionError

    inflight, scope, reports = InFlight(), RequestScope(), []
    with (
        inflight.track("rollout 7 (group 3)", "generate in my.hook", 0.0, scope=scope),
        Watchdog(inflight, report=reports.append, interval=0.01, grace=0.5),
    ):
        assert "last event" not in inflight.describe()
        for rid, finish in (("7-a", "stop"), ("7-b", "length")):
            with scope.holding(rid, abort, 12) as call:
                call.finish = finish
        last = r"last event: engine call 2 \(7-b\) ended by length after 0\.0 s, \d+\.\d s ago"
        assert re.search(last, inflight.describe())
        end = time.monotonic() + 20
        while not reports and time.monotonic() < end:
            time.sleep(0.01)
    assert re.search(last, reports[0])


def test_law_6_what_passes_its_deadline_is_overdue():
    clock = Clock()
    inflight = InFlight(clock)
    with inflight.track("rollout 1", "reward", 5.0), inflight.track("rollout 2", "queued"):
        clock.now = 4.0
        assert inflight.overdue() == []
        clock.now = 6.0
        assert [entry.name for entry in inflight.overdue()] == ["rollout 1"]


def test_law_6_the_watchdog_reports_each_stuck_phase_once_even_when_the_loop_is_blocked():
    inflight, reports, came = InFlight(), [], threading.Event()

    def report(message):
        reports.append(message)
        came.set()

    with (
        Watchdog(inflight, report=report, interval=0.01, grace=0.0),
        inflight.track("rollout 7 (group 3)", "generate in my.hook", 0.01),
    ):
        deadline = time.monotonic() + 20
        while not came.is_set() and time.monotonic() < deadline:
            time.sleep(0.01)  # this thread stands for an event loop that user code blocks
        time.sleep(0.05)
    assert len(reports) == 1
    assert "rollout 7 (group 3): generate in my.hook" in reports[0]
    assert "test_inflight.py" in reports[0]

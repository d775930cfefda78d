"""What is in flight: for each rollout its phase, since when, and the deadline of that phase.

Invariant: an entry exists exactly as long as the work it names. Thread-safe, so that a watchdog thread can
report stuck work even when user code blocks the event loop. Knows nothing of what the work does.
"""

from __future__ import annotations

import itertools
import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from slime.rollout.tasks import abandoned_work
from slime.utils.request_scope import Call, RequestScope

logger = logging.getLogger(__name__)


@dataclass
class Entry:
    """One piece of work. Times are seconds of the registry's clock; `scope` holds its engine calls."""

    name: str
    phase: str
    since: float
    deadline: float | None
    clock: Callable[[], float]
    scope: RequestScope | None = None
    started: float = field(init=False)
    reported: bool = False

    def __post_init__(self) -> None:
        self.started = self.since

    def enter(self, phase: str, seconds: float | None) -> None:
        """Go on to `phase`, which should end within `seconds` (None: bounded by what it waits for)."""
        now = self.clock()
        self.phase, self.since, self.reported = phase, now, False
        self.deadline = None if seconds is None else now + seconds

    @property
    def last_event(self) -> str:
        """The engine call that ended last: its number among those of this work, how it ended, and when."""
        call = None if self.scope is None else self.scope.last
        if self.scope is None or call is None:
            return "no engine call has ended"
        ago = time.monotonic() - call.started - call.seconds
        how = f"ended by {call.finish or 'no reason'} after {call.seconds:.1f} s"
        return f"engine call {self.scope.ended} ({call.rid}) {how}, {max(ago, 0.0):.1f} s ago"

    def line(self, now: float) -> str:
        """Name, phase, age of the phase, how it stands to its deadline, and what happened last."""
        left = "" if self.deadline is None else f", deadline {_in_words(self.deadline - now)}"
        last = f", last event: {self.last_event}" if self.scope is not None and self.scope.ended else ""
        calls = "" if self.scope is None else "".join(map(_call_line, list(self.scope.calls.values())))
        return f"{self.name}: {self.phase} for {now - self.since:.1f} s{left}{last}{calls}"


class InFlight:
    """The registry.

    Args:
        clock: monotonic seconds; tests and simulations pass their own.

    Attributes:
        progress: groups that are accepted and wanted in the step that runs.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.progress = (0, 0)
        self._entries: dict[int, Entry] = {}
        self._keys = itertools.count()
        self._lock = threading.Lock()

    @contextmanager
    def track(
        self, name: str, phase: str, seconds: float | None = None, scope: RequestScope | None = None
    ) -> Iterator[Entry]:
        """Hold an entry while the body runs."""
        now = self.clock()
        deadline = None if seconds is None else now + seconds
        entry = Entry(name=name, phase=phase, since=now, deadline=deadline, clock=self.clock, scope=scope)
        key = next(self._keys)
        with self._lock:
            self._entries[key] = entry
        try:
            yield entry
        finally:
            with self._lock:
                del self._entries[key]

    def __len__(self) -> int:
        return len(self._entries)

    def entries(self) -> list[Entry]:
        """All entries, oldest first."""
        with self._lock:
            return list(self._entries.values())

    def overdue(self) -> list[Entry]:
        """Entries whose phase has passed its deadline."""
        now = self.clock()
        return [entry for entry in self.entries() if entry.deadline is not None and now > entry.deadline]

    def describe(self) -> str:
        """A table for a person: one line an entry, then what was abandoned."""
        now = self.clock()
        lines = [entry.line(now) for entry in self.entries()]
        lines += [f"{name}: ignores its cancellation" for name in abandoned_work()]
        return "\n".join(lines) if lines else "nothing is in flight"


IN_FLIGHT = InFlight()
"""The registry of this process: what `slime.rollout.sglang_rollout` runs is found here."""


class Watchdog:
    """A thread that reports each stuck entry once, with where the event loop stands.

    Args:
        report: receives one message an entry; by default the log, as an error.
        interval: seconds between looks; with `grace` it must stay below the 10 s of law 6.
        grace: seconds past the deadline before an entry counts as stuck: its owner cancels it first.
    """

    def __init__(
        self,
        inflight: InFlight,
        *,
        report: Callable[[str], None] | None = None,
        interval: float = 1.0,
        grace: float = 2.0,
    ) -> None:
        self._inflight = inflight
        self._report = report or _log
        self._interval = interval
        self._grace = grace
        self._stop = threading.Event()
        self._owner = threading.get_ident()
        self._thread = threading.Thread(target=self._watch, name="slime-rollout-watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        self._owner = threading.get_ident()
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(self._interval):
            now = self._inflight.clock()
            for entry in self._inflight.overdue():
                if not entry.reported and entry.deadline is not None and now > entry.deadline + self._grace:
                    entry.reported = True
                    self._report(f"stuck: {entry.line(now)}; event loop at {self._loop_place()}")

    def _loop_place(self) -> str:
        """Innermost frame of the event loop's thread: user code here means that it blocks the loop."""
        frame = sys._current_frames().get(self._owner)
        if frame is None:
            return "an ended thread"
        last = traceback.extract_stack(frame, limit=1)[-1]
        return f"{last.filename}:{last.lineno} in {last.name}"


def _log(message: str) -> None:
    logger.error(message)


def _call_line(call: Call) -> str:
    age = time.monotonic() - call.started
    return f"\n    engine call {call.rid} for {age:.1f} s, {call.prompt_tokens} prompt tokens"


def _in_words(seconds: float) -> str:
    return f"in {seconds:.1f} s" if seconds >= 0 else f"passed {-seconds:.1f} s ago"

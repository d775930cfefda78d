"""The event log of a run: one JSON line for every decision of the scheduler and every step of a rollout.

Invariant: a line is whole or absent; lines stand in the order of the events; nothing is ever rewritten. What
is logged is enough to run the scheduler's decisions again (replay.py). Where a line cannot be written the log
ends, and `check` ends the step with its path: there is no log with a hole, and what is in flight is not lost.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from io import FileIO
from pathlib import Path
from typing import Any

import orjson

from slime.errors import DataError
from slime.rollout.convert import oldest_version
from slime.rollout.outcome import Rollout, failure_reason
from slime.utils.request_scope import Call
from slime.utils.types import Sample

VERSION = 1
NAME = "events.jsonl"


class EventLog:
    """Appends events to a file, or does nothing without one.

    Args:
        path: the file; made with its folder, and appended to where it exists.
        clock: seconds, whose differences the log keeps.

    Raises:
        DataError: the file cannot be written.
    """

    def __init__(self, path: Path | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._path = path
        self._file: FileIO | None = None
        self._failure: OSError | None = None
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("ab", buffering=0)
            _drop_torn_line(path)
            self.write("log", version=VERSION, wall=time.time())
            self.check()

    def now(self) -> float:
        """The moment, for events that happen together."""
        return self._clock()

    def write(self, event: str, t: float | None = None, **values: Any) -> None:
        """Append one event, of now or of `t`; where that fails, the log ends here and `check` tells."""
        if self._file is None:
            return
        line = {"t": round(self.now() if t is None else t, 6), "event": event, **values}
        rest = orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE | orjson.OPT_SERIALIZE_NUMPY)
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            self._failure = error
            self.close()

    def check(self) -> None:
        """Raise what kept an event from being written.

        Raises:
            DataError: with the path of the log.
        """
        if self._failure is not None:
            raise DataError(
                f"the event log cannot be written: {self._failure.strerror}",
                place=str(self._path),
                remedy="free some space",
            ) from self._failure

    def call(self, sample: Sample, call: Call) -> None:
        """An engine call of a rollout that ended."""
        self.write(
            "call",
            rollout=sample.rollout_id,
            group=sample.group_index,
            rid=call.rid,
            seconds=round(call.seconds, 6),
            prompt_tokens=call.prompt_tokens,
            tokens=call.tokens,
            finish=call.finish,
            versions=call.versions,
        )

    def reward(self, sample: Sample, samples: Sequence[Sample], seconds: float) -> None:
        """The reward of a rollout."""
        rewards = [sample.reward if isinstance(sample.reward, float | int) else None for sample in samples]
        self.write("reward", rollout=sample.rollout_id, seconds=round(seconds, 6), rewards=rewards)

    def rollout(self, rollout: Rollout) -> dict[str, Any]:
        """What a group's ``finish`` event says of one rollout."""
        if self._file is None:
            return {}
        return {
            "rollout": rollout.rollout_id,
            "outcome": type(rollout.outcome).__name__.lower(),
            "reason": failure_reason(rollout.outcome),
            "seconds": round(rollout.timings.total, 6),
            "tokens": sum(sample.effective_response_length for sample in rollout.samples),
            "version": oldest_version(rollout.samples) if rollout.valid else None,
        }

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


NO_LOG = EventLog()


def _drop_torn_line(path: Path) -> None:
    """Take the last line away where its newline is missing: the process that wrote it died."""
    content = path.read_bytes() if path.is_file() else b""
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        os.truncate(path, whole)


def read_events(path: Path) -> Iterator[dict[str, Any]]:
    """The events of a log; a torn last line, of a process that died, is left out.

    Raises:
        DataError: no such file, or a line inside it that is no event.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(
            f"no event log: {error.strerror}", place=str(path), remedy="name the --run-dir of a run"
        ) from error
    lines = content.split(b"\n")
    for number, line in enumerate(lines[:-1], start=1):
        yield _event(line, f"{path}:{number}")


def _event(line: bytes, place: str) -> dict[str, Any]:
    remedy = "name the --run-dir of a run, or the events.jsonl in it"
    try:
        event: Any = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise DataError(f"is no event: {error}", place=place, remedy=remedy) from error
    if not isinstance(event, dict) or not {"t", "event"} <= event.keys():
        raise DataError("is no event: it has not the keys t and event", place=place, remedy=remedy)
    return event

"""The event log of a run: one JSON line for every decision of the scheduler and every step of a rollout.

Invariant: a line is whole or absent; lines stand in the order of the events; nothing is ever rewritten. What
is logged is enough to run the scheduler's decisions again (replay.py). Where a line cannot be written, its
rollout fails with the path of the log: there is no log with a hole.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

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
    """

    def __init__(self, path: Path | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._path = path
        self._file: IO[bytes] | None = None
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("ab")
            self.write("log", version=VERSION, wall=time.time())

    def write(self, event: str, **values: Any) -> None:
        """Append one event.

        Raises:
            DataError: the file cannot be written.
        """
        if self._file is None:
            return
        line = {"t": round(self._clock(), 6), "event": event, **values}
        try:
            self._file.write(
                orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE | orjson.OPT_SERIALIZE_NUMPY)
            )
            self._file.flush()
        except OSError as error:
            raise DataError(
                f"the event log cannot be written: {error.strerror}",
                place=str(self._path),
                remedy="free some space",
            ) from error

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


def read_events(path: Path) -> Iterator[dict[str, Any]]:
    """The events of a log; a torn last line, of a process that died, is left out.

    Raises:
        DataError: no such file, or a line inside it that is no event.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"no event log: {error.strerror}", place=str(path)) from error
    lines = content.split(b"\n")
    for number, line in enumerate(lines[:-1], start=1):
        try:
            yield orjson.loads(line)
        except orjson.JSONDecodeError as error:
            raise DataError(f"line {number} is no event: {error}", place=str(path)) from error

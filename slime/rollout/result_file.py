"""Results of offline rollouts on disk: a header with their provenance, then one line a finished group.

Invariant: what was appended is read back whole; a line that a crash tore off is dropped and done anew. A file
is only gone on with under the provenance that it was begun with, and by one process at a time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from slime.errors import CheckpointError, ConfigError, DataError

FORMAT = 1
_MARK = "slime_results"
_SHOWN = 60
Key = tuple[str, int]
"""Data set and group index."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRecord:
    """One rollout.

    Attributes:
        outcome: ``completed``, ``truncated``, ``aborted`` or ``failed``; the first two are valid.
        reason: why it is not valid.
        reward: of a valid rollout.
        response_length: sampled tokens of all siblings.
        samples: its samples as JSON.
    """

    rollout_id: int
    outcome: str
    reason: str | None
    reward: float | None
    response_length: int
    seconds: float
    samples: list[dict[str, Any]]

    @property
    def valid(self) -> bool:
        """Whether it counts."""
        return self.outcome in ("completed", "truncated")


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRecord:
    """The rollouts of one prompt.

    Attributes:
        prompt: digest of the prompt, by which a changed data source is noticed.
    """

    data_set: str
    group_index: int
    prompt: str
    rollouts: list[RolloutRecord]

    @property
    def key(self) -> Key:
        """What identifies the group in the file."""
        return self.data_set, self.group_index


class ResultFile:
    """Opened for going on; a context manager. Of two records of a group the later one counts.

    Attributes:
        records: by key, as they are in the file.
    """

    def __init__(self, path: Path, provenance: Mapping[str, Any]) -> None:
        """Open or begin the file.

        Raises:
            ConfigError: it was begun under another provenance (names every difference), or is in use.
            DataError: it is not a result file, or damaged elsewhere than at its end.
            CheckpointError: it cannot be written.
        """
        self.path = path
        self.records: dict[Key, GroupRecord] = {}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a+b", buffering=0)
        except OSError as error:
            raise self._unwritable(error) from error
        with contextlib.ExitStack() as unless_read:
            unless_read.callback(self._file.close)
            self._lock()
            self._read(json.loads(json.dumps(provenance, default=str)))
            unless_read.pop_all()

    def append(self, record: GroupRecord) -> None:
        """Add a finished group; it survives the end of this process.

        Raises:
            CheckpointError: the file cannot be written; what was appended before is safe.
        """
        self._write(dataclasses.asdict(record))
        self.records[record.key] = record

    def __enter__(self) -> ResultFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._file.close()

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(
                "is being written by another process", place=str(self.path), remedy="wait for it to end"
            ) from error

    def _read(self, provenance: Mapping[str, Any]) -> None:
        self._file.seek(0)
        content = self._file.read()
        whole = content[: content.rfind(b"\n") + 1]
        if whole != content:
            self._file.truncate(len(whole))
        if not whole:
            self._write({_MARK: FORMAT, "provenance": provenance})
            return
        lines = whole.splitlines()
        check_same(self._header(lines[0]), provenance, self.path)
        for number, line in enumerate(lines[1:], start=2):
            record = _record(line, f"{self.path}:{number}")
            self.records[record.key] = record

    def _header(self, line: bytes) -> dict[str, Any]:
        header = _parsed(line)
        if not isinstance(header, dict) or header.get(_MARK) != FORMAT:
            raise DataError(
                "is not a result file of this slime", place=str(self.path), remedy="name another folder"
            )
        provenance: dict[str, Any] = header["provenance"]
        return provenance

    def _write(self, value: Any) -> None:
        line = json.dumps(value).encode() + b"\n"
        try:
            if self._file.write(line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise self._unwritable(error) from error

    def _unwritable(self, error: OSError) -> CheckpointError:
        return CheckpointError(
            f"cannot be written: {error.strerror}",
            place=str(self.path),
            remedy="check the disk and the folder",
        )


def check_same(was: Mapping[str, Any], now: Mapping[str, Any], path: Path) -> None:
    """Check that results may be joined.

    Raises:
        ConfigError: naming every value that differs, before and now.
    """
    before, after = _flat(was), _flat(now)
    names = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    if names:
        lines = [f"  {name}: {_shown(before, name)} in the file, {_shown(after, name)} now" for name in names]
        raise ConfigError(
            "holds results of something else:\n" + "\n".join(lines),
            place=str(path),
            remedy="name another folder with --output, or run as before",
        )


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {prefix + name: value}
    return flat


def _shown(values: Mapping[str, Any], name: str) -> str:
    text = json.dumps(values[name]) if name in values else "nothing"
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return None


def _record(line: bytes, place: str) -> GroupRecord:
    try:
        data = _parsed(line)
        rollouts = [RolloutRecord(**rollout) for rollout in data.pop("rollouts")]
        return GroupRecord(**data, rollouts=rollouts)
    except (TypeError, AttributeError, KeyError) as error:
        raise DataError(
            f"is not the record of a group: {error}",
            place=place,
            remedy="cut the file off before this line; what is missing is then done anew",
        ) from error

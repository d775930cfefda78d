"""Metrics to disk: every metric of every step to `metrics.jsonl`, and to TensorBoard where wanted.

Invariant: a metric is written once under the name it has everywhere; a value that is not a finite number is
written to the JSON file as a string, never dropped.
"""

from __future__ import annotations

import math
import numbers
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import orjson


def is_number(value: object) -> bool:
    """Whether a metric is a finite number (a rollout function may return anything)."""
    return isinstance(value, numbers.Real) and math.isfinite(value)


class Tracker(Protocol):
    """A place that metrics go to."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Write `metrics` of one step."""
        ...

    def close(self) -> None:
        """Flush and let go."""
        ...


class JsonLines:
    """One JSON object a call in `path`: ``{"step": …, "time": …, "metric": value, …}``."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab")

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Append one line and flush it."""
        row: dict[str, Any] = {"step": step, "time": round(time.time(), 3)}
        row |= {name: value if is_number(value) else str(value) for name, value in metrics.items()}
        self._file.write(orjson.dumps(row, option=orjson.OPT_SERIALIZE_NUMPY) + b"\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class TensorBoard:
    """TensorBoard event files below `folder`."""

    def __init__(self, folder: Path) -> None:
        from tensorboard.summary import Writer

        self._writer = Writer(str(folder))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Write one scalar a metric."""
        for name, value in metrics.items():
            if is_number(value):
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Flush and close."""
        self._writer.close()


class Trackers:
    """Several trackers as one."""

    def __init__(self, trackers: list[Tracker]) -> None:
        self._trackers = trackers

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Write to each."""
        for tracker in self._trackers:
            tracker.log(metrics, step)

    def close(self) -> None:
        """Close each."""
        for tracker in self._trackers:
            tracker.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All rows of a `metrics.jsonl`."""
    return [orjson.loads(line) for line in path.read_bytes().splitlines() if line.strip()]


def drop_rows(path: Path, *, step: int, evaluation: int) -> None:
    """Take out what an ended process of the run logged of work that is done again, and a cut line.

    What is taken out goes to ``<name>.replaced`` beside the file.

    Args:
        step, evaluation: rows of rollout steps, and of evaluations, from this step on are taken out.
    """
    if not path.is_file():
        return
    kept: list[bytes] = []
    replaced: list[bytes] = []
    for line in path.read_bytes().splitlines(keepends=True):
        is_kept = line.endswith(b"\n") and _is_before(orjson.loads(line), step, evaluation)
        (kept if is_kept else replaced).append(line)
    if not replaced:
        return
    with path.with_name(path.name + ".replaced").open("ab") as file:
        file.writelines(replaced)
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(b"".join(kept))
    partial.replace(path)


def _is_before(row: Mapping[str, Any], step: int, evaluation: int) -> bool:
    return bool(row["step"] < (step if "rollout/step" in row else evaluation))

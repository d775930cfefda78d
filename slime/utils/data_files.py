"""Rows of prompt files: JSON lines and Parquet, whole or a slice (``path@[a:b]``, negative bounds too).

Invariant: every row is given out or counted in the report with its file and line.
"""

from __future__ import annotations

import codecs
import itertools
import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slime.errors import DataError
from slime.utils.data_report import DatasetReport

logger = logging.getLogger(__name__)
Row = dict[str, Any]
_SLICE = re.compile(r"(?P<path>.*)@\[(?P<start>-?\d*):(?P<stop>-?\d*)\]")


def read_file(path: str | Path) -> Iterator[Row]:
    """The rows of a file; bad lines are left out and logged, with their places, at the end.

    Args:
        path: ``.jsonl`` or ``.parquet``; ``path@[a:b]`` takes rows a to b-1, with Python's rules.

    Raises:
        DataError: no such file, another type of file, or not readable.
    """
    report = DatasetReport(str(path))
    for _, row in read_rows(path, report):
        yield row
    if report.counts:
        logger.warning(report.summary())


def count_rows(path: str | Path) -> int:
    """Number of rows that `read_file` gives, without a log.

    Raises:
        DataError: as `read_file`.
    """
    return sum(1 for _ in read_rows(path, DatasetReport(str(path))))


def read_rows(path: str | Path, report: DatasetReport) -> Iterator[tuple[str, Row]]:
    """Place (``file:line``) and content of each good row; bad rows go to the report."""
    file, bounds = split_slice(str(path))
    if not file.is_file():
        what = "is a folder" if file.is_dir() else "no such file"
        raise DataError(what, place=str(file), remedy="give a .jsonl or .parquet file")
    readers = {".jsonl": _json_lines, ".parquet": _parquet_rows}
    if file.suffix not in readers:
        raise DataError(
            f"cannot read files of type {file.suffix!r}",
            place=str(file),
            remedy="convert it to .jsonl or .parquet",
        )
    reader = readers[file.suffix]
    for place, content in _sliced(lambda: reader(file), bounds):
        report.rows += 1
        if isinstance(content, dict):
            yield place, content
        else:
            report.add(content, place)


def split_slice(path: str) -> tuple[Path, slice]:
    """File and slice of ``path@[a:b]``; without a slice, all rows.

    Raises:
        DataError: something in brackets that is not a slice.
    """
    match = _SLICE.fullmatch(path)
    if match:
        start, stop = (int(match[name]) if match[name] else None for name in ("start", "stop"))
        return Path(match["path"]), slice(start, stop)
    if path.endswith("]") and "@[" in path:
        raise DataError("not a slice of rows", place=path, remedy="write it as path@[start:stop]")
    return Path(path), slice(None)


Content = Row | str
"""A row, or the reason why it is bad."""


def _sliced(rows: Any, bounds: slice) -> Iterator[tuple[str, Content]]:
    """The slice of what `rows()` iterates over; counted in a first pass where a bound is negative."""
    start, stop = bounds.start or 0, bounds.stop
    if start < 0 or (stop is not None and stop < 0):
        start, stop, _ = bounds.indices(sum(1 for _ in rows()))
    return itertools.islice(rows(), start, None if stop is None else max(start, stop))


def _json_lines(file: Path) -> Iterator[tuple[str, Content]]:
    """Rows are the lines that are not blank."""
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            text = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
            if text.strip():
                yield f"{file}:{number}", _json_row(text)


def _json_row(line: bytes) -> Content:
    try:
        row = json.loads(line)
    except UnicodeDecodeError:
        return "not UTF-8"
    except (ValueError, RecursionError):
        return "broken JSON"
    return row if isinstance(row, dict) else f"not a JSON object but {type(row).__name__}"


def _parquet_rows(file: Path) -> Iterator[tuple[str, Content]]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(file) as table:
            number = 0
            for batch in table.iter_batches(batch_size=1024):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{file}:{number}", row
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"not a readable Parquet file: {error}", place=str(file)) from error

"""The event log: whole lines, in order, and no hole that nobody hears of."""

import resource

import pytest

from slime.errors import DataError
from slime.rollout.events import EventLog, read_events


def test_a_torn_last_line_is_left_out_and_the_log_goes_on_behind_a_restart(tmp_path):
    path = tmp_path / "run" / "events.jsonl"
    log = EventLog(path, clock=iter(range(10)).__next__)
    log.write("start", group=1)
    log.close()
    with path.open("ab") as file:
        file.write(b'{"t": 3, "event": "fin')
    assert [event["event"] for event in read_events(path)] == ["log", "start"]


def test_a_broken_line_inside_is_an_error_with_its_number(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"event": "log"}\nnonsense\n{"event": "log"}\n')
    with pytest.raises(DataError, match=r"events.jsonl:1: is no event: it has not the keys t and event"):
        list(read_events(path))
    path.write_bytes(b'{"t": 1, "event": "log"}\nnonsense\n{"t": 2, "event": "log"}\n')
    with pytest.raises(DataError, match=r"events.jsonl:2: is no event(.|\n)*name the --run-dir of a run"):
        list(read_events(path))


def test_a_log_that_cannot_be_written_is_an_error_with_its_path(tmp_path):
    link = tmp_path / "events.jsonl"
    link.symlink_to("/dev/full")
    with pytest.raises(DataError, match=r"cannot be written.*No space left"):
        EventLog(link)


def names(path):
    return [event["event"] for event in read_events(path)]


def test_a_log_is_appended_to_over_the_runs_that_share_it(tmp_path):
    path = tmp_path / "run" / "events.jsonl"
    for name in ("first", "second"):
        log = EventLog(path)
        log.write(name, step=3)
        log.close()
    assert names(path) == ["log", "first", "log", "second"]


def test_the_torn_line_of_a_process_that_died_is_taken_away(tmp_path):
    path = tmp_path / "events.jsonl"
    EventLog(path).close()
    path.open("ab").write(b'{"t": 1, "eve')
    assert names(path) == ["log"]
    EventLog(path).close()
    assert names(path) == ["log", "log"]


def test_a_full_disk_ends_the_log_without_a_hole_and_check_says_so(tmp_path):
    path = tmp_path / "events.jsonl"
    log = EventLog(path)
    log.check()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 100, hard))
    try:
        log.write("fits")
        log.write("large", text="x" * 200)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    log.write("after")
    assert names(path) == ["log", "fits"]
    with pytest.raises(DataError, match=r"events.jsonl: the event log cannot be written: File too large"):
        log.check()
    log.close()

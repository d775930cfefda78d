"""The event log: whole lines, in order, and no hole that nobody hears of."""

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
    with pytest.raises(DataError, match="line 2"):
        list(read_events(path))


def test_a_log_that_cannot_be_written_is_an_error_with_its_path(tmp_path):
    link = tmp_path / "events.jsonl"
    link.symlink_to("/dev/full")
    with pytest.raises(DataError, match=r"cannot be written.*No space left"):
        EventLog(link)

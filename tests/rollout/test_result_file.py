import json
import resource

import pytest

from slime.errors import CheckpointError, ConfigError, DataError
from slime.rollout.result_file import GroupRecord, ResultFile, RolloutRecord

ABOUT = {"model": "m", "data": {"gsm": {"path": "a.jsonl", "sha256": "1" * 64}}}


def record(group, *rewards, data_set="gsm"):
    return GroupRecord(
        data_set=data_set,
        group_index=group,
        prompt="p",
        rollouts=[
            RolloutRecord(
                rollout_id=n,
                outcome="failed" if reward is None else "completed",
                reason="generate: ValueError" if reward is None else None,
                reward=reward,
                response_length=2,
                seconds=0.5,
                samples=[{"response": "x"}],
            )
            for n, reward in enumerate(rewards)
        ],
    )


def test_what_was_appended_is_read_back_and_the_later_record_of_a_group_counts(tmp_path):
    path = tmp_path / "new" / "results.jsonl"
    with ResultFile(path, ABOUT) as file:
        file.append(record(0, None))
        file.append(record(1, 0.0))
        file.append(record(0, 1.0))
    with ResultFile(path, ABOUT) as file:
        assert file.records == {("gsm", 0): record(0, 1.0), ("gsm", 1): record(1, 0.0)}


@pytest.mark.parametrize("cut", [1, 10, 100])
def test_a_torn_last_line_is_dropped_and_the_file_goes_on_after_it(tmp_path, cut):
    path = tmp_path / "results.jsonl"
    with ResultFile(path, ABOUT) as file:
        file.append(record(0, 1.0))
        file.append(record(1, 1.0))
    path.write_bytes(path.read_bytes()[:-cut])
    with ResultFile(path, ABOUT) as file:
        assert list(file.records) == [("gsm", 0)]
        file.append(record(1, 0.0))
    with ResultFile(path, ABOUT) as file:
        assert list(file.records) == [("gsm", 0), ("gsm", 1)]


def test_a_torn_header_begins_the_file_again(tmp_path):
    path = tmp_path / "results.jsonl"
    path.write_text('{"slime_res')
    with ResultFile(path, ABOUT) as file:
        assert file.records == {}
    assert json.loads(path.read_text())["provenance"] == ABOUT


def test_other_provenance_is_refused_and_every_difference_named(tmp_path):
    path = tmp_path / "results.jsonl"
    ResultFile(path, ABOUT).__exit__(None, None, None)
    other = {"model": "n", "data": {"gsm": {"path": "a.jsonl"}}, "seed": 1}
    with pytest.raises(ConfigError) as caught:
        ResultFile(path, other)
    text = str(caught.value)
    assert 'model: "m" in the file, "n" now' in text
    assert "data.gsm.sha256:" in text and "nothing now" in text
    assert "seed: nothing in the file, 1 now" in text and "path" not in text.split("holds")[1]
    assert json.loads(path.read_text())["provenance"] == ABOUT


def test_a_file_in_use_is_refused(tmp_path):
    path = tmp_path / "results.jsonl"
    with ResultFile(path, ABOUT), pytest.raises(ConfigError, match="another process"):
        ResultFile(path, ABOUT)


@pytest.mark.parametrize("line", ["{", "[]", '{"data_set": "gsm"}'])
def test_damage_elsewhere_names_the_line(tmp_path, line):
    path = tmp_path / "results.jsonl"
    with ResultFile(path, ABOUT) as file:
        file.append(record(0, 1.0))
    path.write_text(path.read_text() + line + "\n" + path.read_text())
    with pytest.raises(DataError, match=r"results\.jsonl:3: is not the record of a group"):
        ResultFile(path, ABOUT)


def test_another_file_is_left_alone(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("mine\n")
    with pytest.raises(DataError, match="is not a result file"):
        ResultFile(path, ABOUT)
    assert path.read_text() == "mine\n"


def test_a_full_disk_is_an_error_that_names_the_file_and_what_was_before_is_safe(tmp_path):
    path = tmp_path / "results.jsonl"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with ResultFile(path, ABOUT) as file:
        file.append(record(0, 1.0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 20, limits[1]))
        try:
            with pytest.raises(CheckpointError, match=r"results\.jsonl: cannot be written"):
                file.append(record(1, 1.0))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    with ResultFile(path, ABOUT) as file:
        assert list(file.records) == [("gsm", 0)]

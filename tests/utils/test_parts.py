"""A declared part is what is on the disk, and every difference from it is found."""

import json

import pytest

from slime.errors import CheckpointError
from slime.utils.parts import Part, declare, faults, files_below, write_durably


@pytest.fixture
def root(tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "large").write_bytes(bytes(range(256)) * 8192)
    (tmp_path / "a" / "small").write_text("x")
    (tmp_path / "empty").write_text("")
    return tmp_path


def test_files_are_declared_by_path_below_the_root(root):
    parts = declare(root, files_below(root))
    assert [(part.path, part.size) for part in parts] == [("a/b/large", 2**21), ("a/small", 1), ("empty", 0)]
    assert faults(root, parts) == [] and faults(root, []) == []
    with pytest.raises(ValueError, match="not in the subpath"):
        declare(root / "a", [root / "empty"])


def test_a_copy_of_the_whole_root_is_as_good(root, tmp_path_factory):
    parts = declare(root, files_below(root))
    moved = tmp_path_factory.mktemp("elsewhere") / "root"
    root.rename(moved)
    assert faults(moved, parts) == []


@pytest.mark.parametrize("position", [0, 1000, 2**21 - 1])
def test_a_single_other_bit_is_found_wherever_it_is(root, position):
    parts = declare(root, files_below(root))
    with (root / "a" / "b" / "large").open("r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ 1]))
    assert faults(root, parts) == ["a/b/large holds other bytes than were written"]


def test_missing_and_truncated_files_are_told_apart(root):
    parts = declare(root, files_below(root))
    (root / "a" / "small").unlink()
    (root / "empty").write_text("more")
    with (root / "a" / "b" / "large").open("r+b") as file:
        file.truncate(7)
    assert faults(root, parts) == [
        "a/b/large has 7 bytes of 2097152",
        "a/small is missing",
        "empty has 4 bytes of 0",
    ]


def test_a_file_that_is_not_there_cannot_be_declared(root):
    with pytest.raises(CheckpointError, match="absent: is not on the disk: No such file") as caught:
        declare(root, [root / "absent"])
    assert "--save" in str(caught.value)


def test_a_file_that_cannot_be_read_is_a_fault(root, monkeypatch):
    parts = declare(root, files_below(root))

    def fails(path):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("slime.utils.parts._digest", fails)
    assert faults(root, parts)[0] == "a/b/large cannot be read: Input/output error"


def test_a_folder_in_place_of_a_file_is_no_file(root):
    (root / "empty").unlink()
    (root / "empty").mkdir()
    assert faults(root, [Part("empty", 0, "")]) == ["empty is missing"]


def test_a_small_file_is_replaced_whole(root):
    write_durably(root / "empty", json.dumps({"a": 1}))
    assert json.loads((root / "empty").read_text()) == {"a": 1}
    assert {path.name for path in root.iterdir()} == {"a", "empty"}

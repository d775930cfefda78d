"""A patch applied by git to the old tree gives the new one, whatever the change."""

import os
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.agent.sandbox import SandboxError
from slime.agent.sandbox.diff import tree_diff
from slime.agent.sandbox.patch import Entry, file_patch, quoted

LINES = st.lists(st.sampled_from(["a\n", "b\n", "c\n", "\n", " x\n", "ü\r\n", "end"]), max_size=30).map(
    "".join
)


def apply(folder, patch):
    done = subprocess.run(
        ["git", "apply", "--whitespace=nowarn", "-"], input=patch.encode(), cwd=folder, capture_output=True
    )
    assert done.returncode == 0, done.stderr.decode() + patch


def tree(folder):
    """Path to (kind and mode, content)."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            found[name] = ("link", str(path.readlink()))
        elif path.is_file():
            found[name] = ("x" if path.stat().st_mode & 0o100 else "-", path.read_bytes())
    return found


def difference(old, new, **options):
    descriptors = [os.open(folder, os.O_RDONLY) for folder in (old, new)]
    try:
        return tree_diff(*descriptors, **options)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


@settings(max_examples=60, deadline=None)
@given(old=LINES, new=LINES)
def test_text_round_trip(tmp_path_factory, old, new):
    folder = tmp_path_factory.mktemp("repo")
    (folder / "f").write_bytes(old.encode())
    if old != new:
        apply(folder, file_patch("f", Entry("100644", old.encode()), Entry("100644", new.encode())))
    assert (folder / "f").read_bytes() == new.encode()


def test_binary_sizes_round_trip(tmp_path):
    for size in (1, 25, 26, 27, 51, 52, 53, 104, 5000):
        data = os.urandom(size) + b"\0"
        apply(tmp_path, file_patch(f"f{size}", None, Entry("100644", data)))
        assert (tmp_path / f"f{size}").read_bytes() == data


def test_a_long_file_changed_throughout_is_still_a_patch(tmp_path):
    old = "".join(f"{i}\n" for i in range(4000)).encode()
    new = b"head\n" + "".join(f"{i * 3}\n" for i in range(4000)).encode() + b"tail\n"
    (tmp_path / "f").write_bytes(old)
    apply(tmp_path, file_patch("f", Entry("100644", old), Entry("100644", new)))
    assert (tmp_path / "f").read_bytes() == new


@pytest.fixture
def trees(tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    for folder in (old, new):
        folder.mkdir()
        (folder / "same").write_text("same")
        (folder / "edited").write_text("a\nb\n")
        (folder / "mode").write_text("#!")
        (folder / "deep").mkdir()
        (folder / "deep" / "bin").write_bytes(b"\0old")
    (old / "gone").write_text("gone\n")
    (old / "kind").write_text("file")
    (old / "tree").mkdir()
    (old / "tree" / "leaf").write_text("leaf")
    (old / "empty-gone").touch()
    (new / "edited").write_text("a\nc")
    (new / "mode").chmod(0o755)
    (new / "deep" / "bin").write_bytes(b"\0new" * 100)
    (new / "kind").symlink_to("/etc/passwd")
    (new / "tree").write_text("now a file")
    (new / "with space").write_text("x\n")
    (new / 'quo"te\tü').write_text("y\n")
    (new / "empty").touch()
    (new / "latin").write_bytes(b"caf\xe9\n")
    (new / "fresh" / "er").mkdir(parents=True)
    (new / "fresh" / "er" / "f").write_text("new\n")
    return old, new


def test_every_kind_of_change_round_trips(trees):
    old, new = trees
    apply(old, difference(old, new))
    assert tree(old) == tree(new)


def test_an_equal_tree_has_no_patch(trees):
    assert difference(trees[0], trees[0]) == ""


def test_links_are_not_followed_and_special_files_left_out(tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir()
    new.mkdir()
    (tmp_path / "secret").write_text("secret")
    (new / "folder").symlink_to(tmp_path)
    (new / "file").symlink_to(tmp_path / "secret")
    os.mkfifo(new / "pipe")
    patch = difference(old, new)
    assert "pipe" not in patch
    assert "+secret" not in patch
    assert patch.count("new file mode 120000") == 2


def test_excluded_paths_names_and_folders_are_left_out(trees):
    patch = difference(*trees, exclude=("deep", "fresh/er", "*.none", "gone"))
    assert "deep" not in patch
    assert "fresh" not in patch
    assert "a/gone" not in patch
    assert "edited" in patch


def test_too_long_a_patch_or_file_is_an_error(trees):
    with pytest.raises(SandboxError, match="longer than"):
        difference(*trees, max_bytes=100)
    (Path(trees[1]) / "huge").write_bytes(b"x" * 3000)
    with pytest.raises(SandboxError, match="huge"):
        difference(*trees, max_bytes=2500)


def test_paths_are_quoted_as_git_does():
    assert quoted("plain/path with space") == "plain/path with space"
    assert quoted('a"b\\c\n\u00fc') == '"a\\"b\\\\c\\n\\303\\274"'

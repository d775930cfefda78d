"""The installation is whole or not there, and does nothing where it is whole."""

import pytest

from tests.sglang.install import STAMP, content_of, install_once, requirements


def test_what_fails_half_way_leaves_nothing(tmp_path):
    folder = tmp_path / "environment"

    def fail():
        folder.mkdir()
        (folder / "half").touch()
        raise RuntimeError("no network")

    with pytest.raises(RuntimeError):
        install_once(folder, "wanted", fail)
    assert not folder.exists()


def test_what_is_there_is_left_alone_until_something_else_is_wanted(tmp_path):
    folder, made = tmp_path / "environment", []

    def install():
        folder.mkdir()
        made.append(1)

    for wanted in ("one", "one", "two"):
        install_once(folder, wanted, install)
    assert len(made) == 2
    assert (folder / STAMP).read_text() == "two"


def test_every_package_is_pinned_and_torch_is_the_build_for_cpu():
    packages = [*requirements("requirements.txt"), *requirements("requirements-older.txt")]
    assert all("==" in package for package in packages)
    assert packages[0].startswith("torch==") and packages[0].endswith("+cpu")
    assert content_of("requirements.txt") != content_of("requirements.txt", "shims")

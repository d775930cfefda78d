"""The console script: verbs, errors without tracebacks, conversion, the view of a run."""

import subprocess
import sys

import pytest

from slime.cli import main
from slime.cli.convert import convert, find_gguf
from slime.cli.view import find_dump, steps_table
from slime.errors import DataError, ModelError


def test_without_words_the_verbs_are_listed(capsys):
    assert main([]) == 0
    assert "train" in capsys.readouterr().out


def test_an_unknown_verb_is_refused(capsys):
    assert main(["trian"]) == 2
    assert "unknown verb 'trian'" in capsys.readouterr().err


def test_an_error_of_ours_ends_with_its_message_and_no_traceback(capsys):
    assert main(["train", "--lr", "fast"]) == 2
    text = capsys.readouterr().err
    assert "ConfigError: --lr: expects a number, got 'fast'" in text and "Traceback" not in text


@pytest.mark.parametrize("verb", ["train", "check", "eval", "rollout", "serve", "convert", "rescore", "view"])
def test_every_verb_has_help(verb):
    command = [sys.executable, "-m", "slime.cli", verb, "--help"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.startswith("usage")


def test_convert_names_what_is_missing(tmp_path):
    with pytest.raises(ModelError, match="is neither a model folder nor a .gguf file"):
        find_gguf(str(tmp_path / "absent.gguf"))
    with pytest.raises(ModelError, match="no Python package 'absent_package' is installed"):
        find_gguf("package:absent_package")
    with pytest.raises(ModelError, match="holds 0 .gguf files"):
        find_gguf("package:yaml")


def test_convert_never_writes_over_another_folder(tmp_path):
    (tmp_path / "mine").mkdir()
    with pytest.raises(ModelError, match="is not a model folder"):
        convert("package:yaml", tmp_path / "mine")


@pytest.mark.parametrize("name", ["notes.txt", "config.json"])
def test_force_replaces_nothing_that_slime_did_not_write(tmp_path, name):
    source, mine = tmp_path / "m.gguf", tmp_path / "mine"
    source.write_bytes(b"GGUF")
    mine.mkdir()
    (mine / name).write_text("{}")
    with pytest.raises(ModelError, match="was not written by slime") as caught:
        convert(str(source), mine, force=True)
    assert str(mine) in str(caught.value) and "remedy" in str(caught.value)
    assert [path.name for path in mine.iterdir()] == [name]


def test_view_wants_a_run(tmp_path, capsys):
    assert main(["view", str(tmp_path / "absent")]) == 2
    assert "absent: is not there" in capsys.readouterr().err
    with pytest.raises(DataError, match="holds no metrics.jsonl"):
        steps_table(tmp_path)
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "rollouts" / "3.jsonl").write_text("")
    (tmp_path / "rollouts" / "12.jsonl").write_text("")
    assert find_dump(tmp_path, None).name == "12.jsonl"
    with pytest.raises(DataError, match="no dump of rollout step 5"):
        find_dump(tmp_path, 5)

import pytest

from slime.errors import ModelError
from slime.utils.processing_utils import load_tokenizer
from tests.tiny import tiny_tokenizer


def test_tokenizer_of_a_folder(tmp_path):
    tiny_tokenizer().save_pretrained(tmp_path)
    assert load_tokenizer(tmp_path).encode("ab", add_special_tokens=False) == tiny_tokenizer().encode("ab")


@pytest.mark.parametrize("path, message", [(None, "no model is given"), ("absent", "is not a folder")])
def test_missing_folder_names_the_flag(tmp_path, path, message):
    with pytest.raises(ModelError, match=message) as caught:
        load_tokenizer(path and tmp_path / path)
    assert caught.value.place == "--hf-checkpoint"


def test_folder_without_tokenizer_says_so(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ModelError, match="no tokenizer that loads"):
        load_tokenizer(tmp_path)

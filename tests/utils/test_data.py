import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime.errors import DataError
from slime.utils.data import Dataset, count_rows, read_file
from slime.utils.data_files import split_slice
from tests.tiny import tiny_tokenizer


def write(path, rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def dataset(path, tokenizer=None, max_length=None, **options):
    return Dataset(path, tokenizer, None, max_length, **options)


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer()


@pytest.fixture
def ten_rows(tmp_path):
    return write(tmp_path / "ten.jsonl", [{"input": f"q{n}", "answer": n} for n in range(10)])


@pytest.mark.parametrize(
    "text", ["[2:5]", "[:3]", "[7:]", "[-3:]", "[:-8]", "[-5:-2]", "[8:2]", "[:]", "[5:99]"]
)
def test_slice_means_what_python_means(ten_rows, text):
    start, stop = (int(part) if part else None for part in text[1:-1].split(":"))
    rows = [row["answer"] for row in read_file(f"{ten_rows}@{text}")]
    assert rows == list(range(10))[start:stop]


def test_path_with_brackets_that_are_no_slice_is_refused(ten_rows):
    with pytest.raises(DataError, match="not a slice"):
        list(read_file(f"{ten_rows}@[1:2:3]"))
    assert split_slice("a@b.jsonl")[0].name == "a@b.jsonl"


def test_parquet_and_jsonl_give_the_same_rows(tmp_path, ten_rows):
    import pyarrow
    import pyarrow.parquet

    rows = list(read_file(ten_rows))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "ten.parquet")
    assert list(read_file(tmp_path / "ten.parquet")) == rows
    assert list(read_file(f"{tmp_path}/ten.parquet@[-2:]")) == rows[-2:]


def test_broken_parquet_names_the_file(tmp_path):
    path = write(tmp_path / "x.parquet", ["no parquet"])
    with pytest.raises(DataError, match=r"x\.parquet: not a readable Parquet file"):
        list(read_file(path))


@pytest.mark.parametrize(
    "name, message", [("absent.jsonl", "no such file"), (".", "is a folder"), ("a.csv", "'.csv'")]
)
def test_unusable_path_is_an_error_that_names_it(tmp_path, name, message):
    (tmp_path / "a.csv").write_text("a,b")
    with pytest.raises(DataError, match=message) as caught:
        dataset(tmp_path / name)
    assert caught.value.place == str(tmp_path / name)
    assert caught.value.remedy


def test_bad_rows_are_counted_with_file_and_line_and_logged_once(tmp_path, caplog):
    path = tmp_path / "mixed.jsonl"
    lines = [
        b'{"input": "good"}',
        b"",
        b'{"input": "cut',
        b"[1, 2]",
        b'{"input": "\xff"}',
        b'{"prompt": "other key"}',
        b'{"input": ""}',
        b'{"input": 5}',
        b'{"input": [{"content": "no role"}]}',
        b'{"input": "x", "metadata": "text"}',
        b'{"input": "last"}',
    ]
    path.write_bytes(b"\n".join(lines) + b"\n")
    data = dataset(path)
    assert [sample.prompt for sample in data.samples] == ["good", "last"]
    report = data.report
    assert (report.rows, report.bad, len(data)) == (10, 8, 2)
    assert report.places["broken JSON"] == [f"{path}:3"]
    assert report.places["not UTF-8"] == [f"{path}:5"]
    assert report.places["no key 'input' (--input-key)"] == [f"{path}:6 (keys: prompt)"]
    assert report.counts["prompt is neither a text nor a list of messages"] == 2
    assert len(caplog.records) == 1
    assert f"{path}: 8 of 10 rows left out" in caplog.text


def test_only_the_first_places_of_a_reason_are_kept(tmp_path):
    path = write(tmp_path / "many.jsonl", ["{"] * 50 + [{"input": "x"}])
    report = dataset(path).report
    assert report.counts == {"broken JSON": 50}
    assert report.places["broken JSON"] == [f"{path}:{n}" for n in (1, 2, 3)]
    assert report.summary().endswith(", ...")


def test_read_file_logs_what_it_leaves_out(tmp_path, caplog):
    path = write(tmp_path / "a.jsonl", [{"a": 1}, "{"])
    assert count_rows(path) == 1
    assert not caplog.records
    assert list(read_file(path)) == [{"a": 1}]
    assert f"{path}:2" in caplog.text


def test_byte_order_mark_is_not_part_of_the_first_row(tmp_path):
    (tmp_path / "bom.jsonl").write_text('\ufeff{"input": "x"}\n', encoding="utf-8")
    assert dataset(tmp_path / "bom.jsonl")[0].prompt == "x"


def test_wrong_key_lists_the_keys_of_the_rows_and_the_flag(tmp_path):
    path = write(tmp_path / "a.jsonl", [{"question": "q", "gold": 1}])
    with pytest.raises(DataError, match="gold, question") as caught:
        dataset(path)
    assert "--input-key" in str(caught.value)


def test_wrong_label_key_names_its_flag(ten_rows):
    with pytest.raises(DataError, match="--label-key"):
        dataset(ten_rows, label_key="label")


@pytest.mark.parametrize("rows", [[], ["", "  "]])
def test_empty_data_set_is_an_error(tmp_path, rows):
    with pytest.raises(DataError, match="empty"):
        dataset(write(tmp_path / "a.jsonl", rows))


def test_data_set_of_bad_rows_shows_them(tmp_path):
    path = write(tmp_path / "a.jsonl", ["{", "{"])
    with pytest.raises(DataError, match=r"a\.jsonl:1"):
        dataset(path)


def test_label_keeps_its_type_and_metadata_is_a_copy(tmp_path):
    rows = [{"input": "q", "label": label, "metadata": {"k": [1]}} for label in ("7", 7, 1.5, None)]
    data = dataset(write(tmp_path / "a.jsonl", rows), label_key="label")
    assert [sample.label for sample in data.samples] == ["7", 7, 1.5, None]
    assert all(sample.metadata == {"k": [1]} for sample in data.samples)


def test_text_prompt_becomes_a_user_message_under_the_template(tmp_path, tokenizer):
    path = write(tmp_path / "a.jsonl", [{"input": "hi"}, {"input": [{"role": "system", "content": "s"}]}])
    data = dataset(path, tokenizer, apply_chat_template=True)
    assert data[0].prompt == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert data[1].prompt == "<|im_start|>system\ns<|im_end|>\n<|im_start|>assistant\n"


def test_template_arguments_reach_the_template(tmp_path, tokenizer):
    path = write(tmp_path / "a.jsonl", [{"input": "hi"}])
    options = {"add_generation_prompt": False}
    data = dataset(path, tokenizer, apply_chat_template=True, apply_chat_template_kwargs=options)
    assert data[0].prompt == "<|im_start|>user\nhi<|im_end|>\n"


def test_messages_stay_messages_without_the_template(tmp_path):
    messages = [{"role": "user", "content": "hi"}]
    assert dataset(write(tmp_path / "a.jsonl", [{"input": messages}]))[0].prompt == messages


def test_missing_chat_template_names_the_flag(ten_rows):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(DataError, match="no chat template") as caught:
        dataset(ten_rows, tokenizer, apply_chat_template=True)
    assert caught.value.place == "--apply-chat-template"


def test_messages_that_the_template_refuses_are_bad_rows(tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') if messages[0].role == 'tool' }}ok"
    rows = [{"input": [{"role": "tool", "content": ""}]}, {"input": "x"}]
    data = dataset(write(tmp_path / "a.jsonl", rows), tokenizer, apply_chat_template=True)
    assert data.report.counts == {"the chat template refuses the messages": 1}
    assert "roles must alternate" in data.report.summary()


@pytest.mark.parametrize("tools", [[{"name": "f"}], '[{"name": "f"}]'])
def test_tools_go_to_metadata(tmp_path, tools):
    path = write(tmp_path / "a.jsonl", [{"input": "x", "tools": tools}, {"input": "y"}])
    data = dataset(path, tool_key="tools")
    assert data[0].metadata == {"tools": [{"name": "f"}]}
    assert data[1].metadata == {}


def test_long_prompts_are_left_out_and_counted(tmp_path, tokenizer):
    path = write(tmp_path / "a.jsonl", [{"input": "x" * n} for n in (3, 10, 4)])
    data = dataset(path, tokenizer, 4)
    assert [sample.prompt for sample in data.samples] == ["xxx", "xxxx"]
    assert data.report.places == {"prompt over 4 tokens": [f"{path}:2 (10 tokens)"]}


def test_only_long_prompts_is_an_error_with_the_shortest_length(tmp_path, tokenizer):
    path = write(tmp_path / "a.jsonl", [{"input": "x" * n} for n in (9, 7, 8)])
    with pytest.raises(DataError, match="shortest has 7") as caught:
        dataset(path, tokenizer, 4)
    assert "--rollout-max-prompt-len" in str(caught.value)


@given(seed=st.integers(0, 99), epochs=st.lists(st.integers(0, 9), min_size=1, max_size=4))
def test_shuffle_depends_on_seed_and_epoch_only(tmp_path_factory, seed, epochs):
    path = tmp_path_factory.getbasetemp() / "shuffle.jsonl"
    if not path.exists():
        write(path, [{"input": f"{n}"} for n in range(10)])
    data = dataset(path, seed=seed)
    for epoch in epochs:
        data.shuffle(epoch)
    expected = list(range(10))
    random.Random(seed + epochs[-1]).shuffle(expected)
    assert [int(sample.prompt) for sample in data.samples] == expected

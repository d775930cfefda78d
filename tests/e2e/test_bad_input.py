"""Bad input gets an error that names the field, the place and the remedy; no traceback, exit code 2."""

import json
import socket

import pytest

from tests.e2e.conftest import World
from tests.tiny import tiny_model, tiny_tokenizer


def write(world: World, name: str, text: str):
    path = world.folder / name
    path.write_text(text)
    return path


def row(text: str = "say 1") -> str:
    return json.dumps({"input": [{"role": "user", "content": text}], "label": "1"})


def refused(world: World, name: str, **extra) -> str:
    text = world.train(name, code=2, **extra)
    assert "Traceback" not in text and "\n  File " not in text, text
    return text


def test_missing_file(world):
    text = refused(world, "missing-file", prompt_data="nowhere.jsonl")
    assert "--prompt-data" in text and "nowhere.jsonl" in text and "remedy" in text


def test_unknown_model_folder(world):
    text = refused(world, "no-model", hf_checkpoint="nowhere")
    assert "--hf-checkpoint" in text and "nowhere" in text


def test_empty_data_set(world):
    text = refused(world, "empty", prompt_data=write(world, "empty.jsonl", ""))
    assert "empty.jsonl" in text


def test_a_broken_line_is_reported_with_its_place_and_the_rest_is_used(world):
    data = write(world, "broken.jsonl", "\n".join([row(), "{oops", row("say 2"), row(), row()]) + "\n")
    text = world.train("broken-line", prompt_data=data, num_rollout=1)
    assert "broken.jsonl:2" in text


def test_wrong_key(world):
    text = refused(world, "wrong-key", input_key="question")
    assert "no key 'question' (--input-key)" in text and "(keys: input, label)" in text


def test_every_prompt_too_long(world):
    text = refused(world, "too-long", rollout_max_prompt_len=3)
    assert "--rollout-max-prompt-len" in text


def test_no_chat_template(world):
    folder = world.folder / "no-template"
    tiny_model().save_pretrained(folder)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    tokenizer.save_pretrained(folder)
    text = refused(world, "no-template-run", hf_checkpoint=folder)
    assert "chat template" in text and "--apply-chat-template" in text


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("tests.e2e.absent.function", "cannot import"),
        ("tests.e2e.hooks.absent", "no attribute 'absent'"),
        ("tests.e2e.hooks.wrong_signature", "wrong_signature"),
        ("tests.e2e.hooks.NOT_A_FUNCTION", "NOT_A_FUNCTION"),
    ],
)
def test_a_hook_that_cannot_work(world, path, message):
    name = "hook-" + path.rsplit(".", 1)[1]
    text = refused(world, name, custom_generate_function_path=path)
    assert "--custom-generate-function-path" in text and message in text


def test_a_port_that_is_taken(world):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        text = refused(world, "port", engine_port=port)
    assert str(port) in text and "is taken" in text


def test_no_reward_is_configured(world):
    text = refused(world, "no-reward", custom_rm_path=None)
    assert "--rm-type" in text and "--custom-rm-path" in text


def test_an_unknown_reward(world):
    text = refused(world, "bad-reward", custom_rm_path=None, rm_type="mth")
    assert "mth" in text and "'math'" in text


def test_a_folder_that_holds_another_run(world):
    (world.folder / "taken").mkdir()
    (world.folder / "taken" / "metrics.jsonl").write_text("")
    assert "holds the metrics of another run" in refused(world, "taken")


def test_a_dry_run_prints_the_plan_and_stops(world):
    text = world.train("dry", dry_run=True)
    assert "optimizer step" in text and not (world.folder / "dry").exists()
    assert "memory of the trainer   about" in text and "2,048 tokens in a micro-batch" in text

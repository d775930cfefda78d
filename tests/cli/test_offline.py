"""`slime eval` and `slime rollout`: the same code offline, resumable at any point."""

import json
import os
import signal
import subprocess
import sys
import threading

import pytest

from slime.cli import main
from slime.rollout.dump import load_groups
from slime.rollout.groups import flatten
from slime.rollout.sglang_rollout import GenerateState
from slime.serving.scripted import ScriptedAnswer
from slime.utils.engine_client import EngineClient
from tests.rollout.kit import HOOKS, scripted
from tests.tiny import tiny_tokenizer

OWN = "slime.rollout.sft_rollout.generate_rollout"


@pytest.fixture(autouse=True)
def forget_state():
    yield
    GenerateState.clear_instance()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tiny_tokenizer().save_pretrained(folder)
    (folder / "config.json").write_text('{"model_type": "llama", "vocab_size": 259}')
    return folder


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "small.jsonl"
    path.write_text("".join(json.dumps({"input": text, "label": text}) + "\n" for text in "abcd"))
    return path


def eval_words(server, model, data, out, *more):
    return [
        *("eval", "--engine-url", server.url, "--hf-checkpoint", str(model), "--output", str(out)),
        *("--eval-prompt-data", "small", str(data), "--n-samples-per-eval-prompt", "2"),
        *("--rollout-max-response-len", "8", "--custom-rm-path", HOOKS + "reward_by_length"),
        *more,
    ]


def rollout_words(server, model, data, out, *more):
    return [
        *("rollout", "--engine-url", server.url, "--hf-checkpoint", str(model), "--output", str(out)),
        *("--prompt-data", str(data), "--n-samples-per-prompt", "2"),
        *("--rollout-max-response-len", "8", "--custom-rm-path", HOOKS + "reward_by_length"),
        *more,
    ]


def by_prompt(call):
    """Two tokens for the prompts a and b, one for others."""
    return ScriptedAnswer(token_ids=[70, 71] if call.prompt in "ab" else [70])


def metrics(out):
    return json.loads((out / "metrics.json").read_text())["metrics"]


def lines(out):
    return (out / "results.jsonl").read_text().splitlines()


def test_an_evaluation_gives_scores_table_and_metrics(model, data, tmp_path, capsys):
    with scripted(by_prompt) as server:
        code = main(eval_words(server, model, data, tmp_path / "out", "--pass-threshold", "2"))
    assert code == 0
    values = metrics(tmp_path / "out")
    assert values["eval/small"] == 1.5
    assert values["eval/small-pass@1"] == values["eval/small-pass@2"] == 0.5
    assert values["eval/small/rollouts"] == 8.0 and values["eval/small/failed"] == 0.0
    assert values["eval/small/response_len/mean"] == 1.5
    assert "pass@2" in capsys.readouterr().out
    header, *groups = map(json.loads, lines(tmp_path / "out"))
    assert header["provenance"]["weight_version"] == "default"
    assert header["provenance"]["data"]["small"]["n_samples_per_eval_prompt"] == 2
    assert sorted(group["group_index"] for group in groups) == [0, 1, 2, 3]


def test_a_rerun_does_only_what_is_missing(model, data, tmp_path, capsys):
    out = tmp_path / "out"
    with scripted(by_prompt) as server:
        words = eval_words(server, model, data, out)
        assert main([*words, "--limit", "1"]) == 0
        assert len(server.engine.calls) == 2
        assert main(words) == 0
        assert len(server.engine.calls) == 8
        whole = (out / "results.jsonl").read_bytes()
        (out / "results.jsonl").write_bytes(whole[:-30])
        assert main(words) == 0
        assert len(server.engine.calls) == 10
        assert main(words) == 0
        assert len(server.engine.calls) == 10
    assert metrics(out)["eval/small"] == 1.5
    assert "0 of 8 rollouts to do" in capsys.readouterr().err


def test_resumed_results_are_those_of_one_go(model, data, tmp_path):
    """The same rollouts, ids and seeds, however often it was begun again."""
    with scripted(by_prompt) as server:
        main(rollout_words(server, model, data, tmp_path / "whole"))
        for limit in ("1", "3", "4"):
            main(rollout_words(server, model, data, tmp_path / "parts", "--limit", limit))
        seeds = [call.params.sampling_seed for call in server.engine.calls]
    assert sorted(seeds[:8]) == sorted(seeds[8:])
    assert metrics(tmp_path / "whole") == metrics(tmp_path / "parts")
    whole, parts = (load_groups(str(tmp_path / d / "rollouts/0.jsonl"), 0) for d in ("whole", "parts"))
    keys = [[(s.group_index, s.rollout_id, s.tokens, s.reward) for s in flatten(g)] for g in (whole, parts)]
    assert keys[0] == keys[1]


@pytest.mark.parametrize(
    "words, name",
    [
        (["--eval-temperature", "0.5"], "data.small.temperature: 1.0 in the file, 0.5 now"),
        (["--rollout-seed", "7"], "seed: 42 in the file, 7 now"),
        (["--n-samples-per-eval-prompt", "3"], "data.small.n_samples_per_eval_prompt: 2 in the file"),
        (["--custom-rm-path", HOOKS + "reward_raises"], "hooks.custom_rm_path"),
    ],
)
def test_results_of_something_else_are_never_joined(model, data, tmp_path, capsys, words, name):
    with scripted(by_prompt) as server:
        assert main(eval_words(server, model, data, tmp_path / "out")) == 0
        before = lines(tmp_path / "out")
        assert main(eval_words(server, model, data, tmp_path / "out", *words)) == 2
        assert len(server.engine.calls) == 8
    assert name in capsys.readouterr().err
    assert lines(tmp_path / "out") == before


def test_other_weights_templates_or_data_are_noticed(data, tmp_path, capsys):
    model, tokenizer = tmp_path / "model", tiny_tokenizer()
    tokenizer.save_pretrained(model)
    (model / "config.json").write_text("{}")
    with scripted(by_prompt) as server:
        words = eval_words(server, model, data, tmp_path / "out")
        assert main(words) == 0
        server.engine.weight_version = "7"
        assert main(words) == 2
        assert 'weight_version: "default" in the file, "7" now' in capsys.readouterr().err
        server.engine.weight_version = "default"
        template = tokenizer.chat_template
        tokenizer.chat_template = "{{ messages[0].content }}"
        tokenizer.save_pretrained(model)
        GenerateState.clear_instance()
        assert main(words) == 2
        text = capsys.readouterr().err
        assert "chat_template:" in text and "tokenizer:" not in text
        tokenizer.chat_template = template
        tokenizer.save_pretrained(model)
        GenerateState.clear_instance()
        assert main(words) == 0
        data.write_text(data.read_text() + '{"input": "e"}\n')
        assert main(words) == 2
        assert "data.small.sha256" in capsys.readouterr().err


def test_weights_that_change_meanwhile_end_the_evaluation(model, data, tmp_path, capsys):
    def policy(call):
        if call.number == 5:
            server.engine.weight_version = "2"
        return ScriptedAnswer(token_ids=[70])

    with scripted(policy) as server:
        words = eval_words(server, model, data, tmp_path / "out", "--sglang-server-concurrency", "1")
        assert main(words) == 2
    assert "its weights changed from version 'default' to '2'" in capsys.readouterr().err
    assert len(lines(tmp_path / "out")) == 3


def test_law_4_failed_rollouts_are_left_out_told_and_done_again(model, data, tmp_path, capsys):
    data.write_text('{"input": "fail"}\n{"input": "b"}\n')
    out = tmp_path / "out"
    with scripted(by_prompt) as server:
        words = eval_words(server, model, data, out, "--custom-generate-function-path", HOOKS + "mixed")
        assert main(words) == 0
        assert metrics(out)["eval/small/failed"] == 1.0
        assert metrics(out)["eval/small/rollouts"] == 3.0
        assert "small: 1 x generate: ValueError" in capsys.readouterr().out
        calls = len(server.engine.calls)
        assert main(words) == 0
        assert len(server.engine.calls) == calls
        assert "1 of 4 rollouts to do" in capsys.readouterr().err


def test_an_engine_that_dies_leaves_a_file_to_go_on_with(model, data, tmp_path, capsys, monkeypatch):
    quick = EngineClient.__init__.__kwdefaults__ | {"retries": 2, "backoff": 0.01}
    monkeypatch.setattr(EngineClient.__init__, "__kwdefaults__", quick)
    out = tmp_path / "out"

    def dies(call):
        return ScriptedAnswer(token_ids=[70], die_after=0 if call.number == 4 else None)

    with scripted(dies) as server:
        words = eval_words(server, model, data, out, "--sglang-server-concurrency", "1")
        assert main([*words, "--max-failed-rollout-ratio", "0.1"]) == 2
    assert "rollouts failed" in capsys.readouterr().err
    done = sum(r["reward"] is not None for line in lines(out)[1:] for r in json.loads(line)["rollouts"])
    assert done == 4
    with scripted(lambda call: ScriptedAnswer(token_ids=[70])) as server:
        assert main(eval_words(server, model, data, out)) == 0
        assert len(server.engine.calls) == 4
    assert metrics(out)["eval/small"] == 1.0


def test_a_group_that_is_rewarded_together_is_done_anew_as_a_whole(model, data, tmp_path):
    data.write_text('{"input": "fail"}\n{"input": "b"}\n')
    hooks = ["--group-rm", "--custom-generate-function-path", HOOKS + "mixed"]
    with scripted(by_prompt) as server:
        words = eval_words(server, model, data, tmp_path / "out", *hooks)
        words[words.index("--custom-rm-path") + 1] = HOOKS + "reward_group"
        assert main(words) == 0
        assert len(server.engine.calls) == 3
        assert main(words) == 0
        assert len(server.engine.calls) == 4


def test_the_configuration_of_a_run_can_be_evaluated(model, data, tmp_path):
    flags = {"lr": 1e-5, "num-rollout": 3, "rollout-batch-size": 2, "advantage-estimator": "rloo"}
    flags |= {"prompt-data": str(data), "dynamic-sampling-filter-path": HOOKS + "drop_all"}
    (tmp_path / "run.yaml").write_text(json.dumps(flags))
    with scripted(by_prompt) as server:
        words = eval_words(server, model, data, tmp_path / "out", "--config", str(tmp_path / "run.yaml"))
        assert main(words) == 0
    assert metrics(tmp_path / "out")["eval/small"] == 1.5


def test_fan_out_counts_once_a_rollout_and_keeps_its_groups(model, data, tmp_path):
    hook = ("--custom-generate-function-path", HOOKS + "fans_out")
    with scripted() as server:
        assert main(eval_words(server, model, data, tmp_path / "eval", *hook)) == 0
        assert main(rollout_words(server, model, data, tmp_path / "rollout", *hook)) == 0
    assert metrics(tmp_path / "eval")["eval/small/rollouts"] == 8.0
    assert metrics(tmp_path / "rollout")["rollout/rollouts/rollouts"] == 8.0
    groups = load_groups(str(tmp_path / "rollout/rollouts/0.jsonl"), 0)
    assert [[len(rollout) for rollout in group] for group in groups] == [[2, 2]] * 4


def test_rollouts_are_dumped_by_step_with_groups_and_rewards(model, data, tmp_path, capsys):
    out = tmp_path / "out"
    with scripted(by_prompt) as server:
        assert main(rollout_words(server, model, data, out, "--rollout-batch-size", "3")) == 0
    groups = [load_groups(str(out / "rollouts" / "{rollout_id}.jsonl"), step) for step in (0, 1)]
    assert [len(step) for step in groups] == [3, 1]
    samples = list(flatten(groups))
    assert [sample.reward for sample in samples] == [2.0] * 4 + [1.0] * 4
    assert all(sample.tokens and sample.rollout_log_probs and sample.loss_mask for sample in samples)
    assert main(["view", str(out / "rollouts" / "0.jsonl")]) == 0
    assert "reward" in capsys.readouterr().out


def test_data_sets_of_a_mixture_are_told_apart(model, data, tmp_path):
    (tmp_path / "more.jsonl").write_text('{"input": "a"}\n{"input": "z"}\n')
    out = tmp_path / "out"
    with scripted(by_prompt) as server:
        words = rollout_words(server, model, data, out)
        words[words.index(str(data)) + 1 : words.index(str(data)) + 1] = [str(tmp_path / "more.jsonl")]
        assert main(words) == 0
    assert metrics(out)["rollout/small/rollouts"] == 8.0
    assert metrics(out)["rollout/more/rollouts"] == 4.0


@pytest.mark.parametrize(
    "words, message",
    [
        (["eval", "--output", "x"], "nothing to evaluate"),
        (["eval", "--output", "x", "--eval-prompt-data", "a", "{data}"], "there is no engine"),
        (["rollout", "--output", "x", "--engine-url", "ftp://a"], "expects http://HOST:PORT"),
        (["rollout", "--output", "x", "--limit", "0"], "--limit: must be at least 1"),
        (["rollout", "--output", "x", "--rollout-function-path", OWN], "in its own way"),
        (["rollout", "--output", "x", "--limt", "3"], "unknown flag"),
    ],
)
def test_what_cannot_be_done_is_said(data, tmp_path, monkeypatch, capsys, words, message):
    monkeypatch.chdir(tmp_path)
    assert main([word.format(data=data) for word in words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_aborts_at_the_engine_and_leaves_a_file_to_go_on_with(model, data, tmp_path, number):
    """In a process of its own; while it hangs in the second prompt, the first is recorded."""
    out, hangs = tmp_path / "out", threading.Event()

    def policy(call):
        if call.number >= 2:
            hangs.set()
        return ScriptedAnswer(token_ids=[70], hang=call.number >= 2)

    with scripted(policy) as server:
        words = eval_words(server, model, data, out, "--sglang-server-concurrency", "1")
        command = [sys.executable, "-m", "slime.cli", *words]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=dict(os.environ))
        assert hangs.wait(60)
        process.send_signal(number)
        _, error = process.communicate(timeout=60)
        assert process.returncode == 130, error
        assert "interrupted" in error and "Traceback" not in error
        assert any(event.startswith("abort:") for event in server.engine.events)
    with scripted(lambda call: ScriptedAnswer(token_ids=[70])) as server:
        assert main(eval_words(server, model, data, out)) == 0
        assert len(server.engine.calls) == 6


def test_the_verbs_load_neither_ray_nor_torch():
    loaded = "print([name for name in ('ray', 'torch', 'aiohttp') if name in sys.modules])"
    code = f"import sys, slime.cli.eval, slime.cli.rollout; {loaded}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"

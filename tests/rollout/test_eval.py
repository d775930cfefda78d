import json
import logging
from types import SimpleNamespace

import pytest

from slime.errors import HookError, RolloutFailedError
from slime.rollout.eval import check_eval_hooks
from slime.rollout.scores import eval_metrics
from slime.rollout.sglang_rollout import GenerateState, generate_rollout
from slime.serving.scripted import ScriptedAnswer
from slime.utils.eval_config import EvalDatasetConfig
from tests.rollout.kit import HOOKS, engine_args, scripted, state_for


@pytest.fixture(autouse=True)
def forget_state():
    yield
    GenerateState.clear_instance()


def prompts(path, *texts):
    path.write_text("".join(json.dumps({"input": text, "label": text}) + "\n" for text in texts))
    return str(path)


def evaluate(server, tmp_path, *texts, config=None, **values):
    """The output of an evaluation on one data set named `small`."""
    data = prompts(tmp_path / "small.jsonl", *(texts or ("a", "b")))
    if config is not None:
        entry = {"name": "small", "path": data} | config
        (tmp_path / "eval.yaml").write_text(json.dumps({"eval": {"datasets": [entry]}}))
        values["eval_config"] = str(tmp_path / "eval.yaml")
    else:
        values["eval_prompt_data"] = ["small", data]
    args = engine_args(server.url, **values)
    state_for(args)
    return generate_rollout(args, 5, None, evaluation=True)


def by_prompt(call):
    """Two tokens for the prompt a, one for others."""
    return ScriptedAnswer(token_ids=[70, 71] if call.prompt == "a" else [70])


def test_every_prompt_is_sampled_and_rewarded(tmp_path):
    with scripted(by_prompt) as server:
        output = evaluate(server, tmp_path, n_samples_per_eval_prompt=2)
    entry = output.data["small"]
    assert entry["rewards"] == [2.0, 2.0, 1.0, 1.0]
    assert entry["truncated"] == [False] * 4
    assert [(s.group_index, s.rollout_id) for s in entry["samples"]] == [(0, 0), (0, 1), (1, 2), (1, 3)]
    assert entry["rollout_ids"] == [0, 1, 2, 3]
    metrics = eval_metrics(SimpleNamespace(pass_threshold=2.0), output.data)
    assert metrics["eval/small"] == 1.5
    assert metrics["eval/small/response_len/mean"] == 1.5
    assert metrics["eval/small-truncated_ratio"] == 0.0
    assert metrics["eval/small-pass@2"] == 0.5
    assert metrics["eval/small/rollouts"] == 4.0


def test_sampling_parameters_and_limits_are_the_data_sets_own(tmp_path):
    config = {"temperature": 0.0, "max_response_len": 3, "max_context_len": 3, "top_k": 1}
    with scripted(lambda call: ScriptedAnswer(token_ids=[70] * 9)) as server:
        output = evaluate(server, tmp_path, "ab", config=config)
        params = server.engine.calls[0].params
    assert (params.temperature, params.top_k, params.max_new_tokens) == (0.0, 1, 1)
    assert output.data["small"]["truncated"] == [True]


def test_hooks_of_a_data_set_win(tmp_path):
    config = {
        "custom_generate_function_path": HOOKS + "reads_evaluation",
        "custom_rm_path": HOOKS + "reward_by_length",
    }
    with scripted() as server:
        output = evaluate(
            server,
            tmp_path,
            config=config,
            custom_generate_function_path=HOOKS + "raises",
            custom_rm_path=HOOKS + "reward_raises",
        )
    assert all(sample.metadata["evaluation"] for sample in output.data["small"]["samples"])


def test_hooks_of_a_data_set_are_checked_before_anything_runs():
    for hooks in (
        {"custom_rm_path": "absent.module.reward"},
        {"custom_generate_function_path": HOOKS + "HERE"},
    ):
        with pytest.raises(HookError, match=r"--custom-"):
            check_eval_hooks([EvalDatasetConfig(name="a", path="p", **hooks)])


def test_fan_out_counts_once_a_rollout(tmp_path):
    with scripted() as server:
        output = evaluate(server, tmp_path, custom_generate_function_path=HOOKS + "fans_out")
    entry = output.data["small"]
    assert entry["rewards"] == [2.5, 2.5]
    assert len(entry["samples"]) == 4
    assert eval_metrics(None, output.data)["eval/small/response_len/mean"] == 5.0


def test_law_4_failed_rollouts_are_counted_and_left_out(tmp_path, caplog):
    with scripted(by_prompt) as server, caplog.at_level(logging.WARNING):
        output = evaluate(
            server,
            tmp_path,
            "fail",
            "b",
            n_samples_per_eval_prompt=2,
            custom_generate_function_path=HOOKS + "mixed",
        )
    assert output.metrics == {"eval/small/failed": 1.0}
    assert len(output.data["small"]["rewards"]) == 3
    assert "1 of 4 rollouts failed and are left out" in caplog.text


def test_an_evaluation_in_which_all_fails_is_an_error(tmp_path):
    with scripted() as server, pytest.raises(RolloutFailedError, match="none of 2 rollouts succeeded"):
        evaluate(server, tmp_path, custom_generate_function_path=HOOKS + "raises")

import dataclasses
import json
import re
import types

import pytest

from slime.errors import ConfigError
from slime.utils.eval_config import build_eval_dataset_configs


def build(tmp_path, text, **args):
    path = tmp_path / "eval.yaml"
    path.write_text(text)
    return build_eval_dataset_configs(types.SimpleNamespace(eval_config=str(path), **args))


def test_entry_beats_defaults_beat_eval_flags_beat_rollout_flags(tmp_path):
    args = {"eval_top_p": 0.3, "rollout_top_p": 0.2, "eval_top_k": 7, "rollout_max_response_len": 64}
    a, b = build(
        tmp_path,
        """
        eval:
          defaults: {temperature: 0.6, top_p: 0.5}
          datasets:
            - {name: a, path: a.jsonl, temperature: 0.0}
            - {name: b, path: b.jsonl}
        """,
        rollout_temperature=1.0,
        **args,
    )
    assert (a.temperature, b.temperature) == (0.0, 0.6)
    assert (a.top_p, a.top_k, a.max_response_len) == (0.5, 7, 64)


def test_root_may_be_the_eval_section_and_datasets_a_mapping(tmp_path):
    (config,) = build(tmp_path, "datasets: {aime: {path: a.jsonl, rm_type: math}}")
    assert (config.name, config.path, config.rm_type) == ("aime", "a.jsonl", "math")


def test_pairs_of_the_command_line():
    args = types.SimpleNamespace(eval_prompt_data=["a", "a.jsonl", "b", "b.jsonl"], eval_label_key="gold")
    assert [(c.name, c.path, c.label_key) for c in build_eval_dataset_configs(args)] == [
        ("a", "a.jsonl", "gold"),
        ("b", "b.jsonl", "gold"),
    ]


def test_nothing_configured_is_no_data_set():
    assert build_eval_dataset_configs(types.SimpleNamespace()) == []


def test_odd_pairs_are_refused():
    with pytest.raises(ConfigError, match="expects pairs"):
        build_eval_dataset_configs(types.SimpleNamespace(eval_prompt_data=["a", "a.jsonl", "b"]))


def test_every_key_reaches_its_data_set(tmp_path):
    keys = {
        "rm_type": "math",
        "custom_rm_path": "m.rm",
        "custom_generate_function_path": "m.generate",
        "input_key": "q",
        "label_key": "gold",
        "tool_key": "functions",
        "metadata_key": "extra",
        "apply_chat_template": True,
        "apply_chat_template_kwargs": {"enable_thinking": False},
        "n_samples_per_eval_prompt": 8,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 20,
        "min_new_tokens": 1,
        "max_response_len": 64,
        "max_prompt_len": 32,
        "max_context_len": 96,
        "stop": ["END"],
        "stop_token_ids": [7],
        "repetition_penalty": 1.1,
        "skip_special_tokens": True,
        "no_stop_trim": False,
        "pass_threshold": 0.5,
    }
    for text in (
        {"defaults": keys, "datasets": {"a": {"path": "p"}}},
        {"datasets": {"a": {"path": "p", **keys}}},
    ):
        (config,) = build(tmp_path, json.dumps(text))
        assert dataclasses.asdict(config) == {"name": "a", "path": "p", **keys}


def test_one_stop_need_not_be_a_list(tmp_path):
    (config,) = build(tmp_path, "datasets: {a: {path: p, stop: END, stop_token_ids: 7}}")
    assert (config.stop, config.stop_token_ids) == (["END"], [7])


def test_keys_that_were_never_read_say_what_takes_their_place(tmp_path):
    with pytest.raises(TypeError, match="reward_model: use rm_type"):
        build(tmp_path, "datasets: {a: {path: p, reward_model: x}}")
    with pytest.raises(ValueError, match="eval_task_timeout: the deadline of a rollout is --rollout-timeout"):
        build(tmp_path, "{defaults: {eval_task_timeout: 3}, datasets: {a: {path: p}}}")
    with pytest.raises(TypeError, match="did you mean 'temperature'"):
        build(tmp_path, "datasets: {a: {path: p, temprature: 1}}")


@pytest.mark.parametrize(
    "entry, message",
    [
        ("temperature: hot", "temperature must be of type float, got 'hot'"),
        ("temperature: -1", "temperature must be at least 0"),
        ("top_p: 1.5", "top_p must be above 0 and at most 1"),
        ("top_k: 0", "top_k must be -1"),
        ("n_samples_per_eval_prompt: true", "n_samples_per_eval_prompt must be of type int"),
        ("n_samples_per_eval_prompt: 0", "must be at least 1"),
        ("apply_chat_template_kwargs: [1]", "apply_chat_template_kwargs must be"),
        ("stop_token_ids: [a]", "stop_token_ids must be"),
    ],
)
@pytest.mark.parametrize(
    "where", ["{{datasets: {{a: {{path: p, {}}}}}}}", "{{defaults: {{{}}}, datasets: {{a: {{path: p}}}}}}"]
)
def test_values_of_a_wrong_type_or_range_name_their_key(tmp_path, where, entry, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        build(tmp_path, where.format(entry))


@pytest.mark.parametrize(
    "text, kind, message",
    [
        ("eval: {defaults: {tempreature: 1}, datasets: [{name: a, path: p}]}", ValueError, "tempreature"),
        ("eval: {defaults: {path: p}, datasets: [{name: a, path: p}]}", ValueError, "path"),
        ("eval: {datasets: [{name: a, path: p, app_service: x}]}", TypeError, "app_service"),
        ("eval: {dataset: [{name: a, path: p}]}", ValueError, "dataset"),
        ("eval: {datasets: [{name: a}]}", ConfigError, "'a' has no path"),
        ("eval: {datasets: [{name: a, path: p}, {name: a, path: q}]}", ConfigError, "names repeat: a"),
        ("eval: {datasets: []}", ConfigError, "non-empty"),
        ("eval: [1]", ConfigError, "eval must be a mapping"),
        ("eval: {", ConfigError, "is not YAML"),
    ],
)
def test_wrong_file_is_an_error_of_its_kind_that_names_the_key(tmp_path, text, kind, message):
    with pytest.raises(kind, match=message) as caught:
        build(tmp_path, text)
    assert isinstance(caught.value, ConfigError)


def test_missing_file_names_it(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.yaml"):
        build_eval_dataset_configs(types.SimpleNamespace(eval_config=str(tmp_path / "none.yaml")))


def test_both_flags_contradict(tmp_path):
    with pytest.raises(ConfigError, match="both are set"):
        build(tmp_path, "datasets: {a: {path: p}}", eval_prompt_data=["a", "p"])

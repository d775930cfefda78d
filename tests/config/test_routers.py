"""Flags of routers, topologies and external servers that could have no effect are refused."""

import pytest

from slime.config import load_config
from slime.errors import ConfigError

FOUND = "--sglang-router-ip h --sglang-router-port 1"
TRAIN_ONLY = "--debug-train-only --load-debug-rollout-data x"


@pytest.fixture
def base(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "data.jsonl").write_text('{"input": "1+1", "label": "2"}\n')
    (tmp_path / "t.yaml").write_text("sglang: []")
    return [
        *("--hf-checkpoint", str(tmp_path / "model"), "--rollout-engine", "embedded"),
        *("--prompt-data", str(tmp_path / "data.jsonl"), "--rm-type", "math", "--label-key", "label"),
        *("--rollout-batch-size", "8", "--n-samples-per-prompt", "4"),
        *("--num-rollout", "10", "--rollout-max-response-len", "16"),
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            f"{FOUND} --router-policy round_robin",
            "--router-policy: has no effect without a router of its own",
        ),
        (f"{FOUND} --sglang-router-request-timeout-secs 9", "-timeout-secs: has no effect without a router"),
        ("--sglang-router-ip h", "--sglang-router-ip: needs --sglang-router-port"),
        (
            "--sglang-config t.yaml --prefill-num-servers 1",
            "--sglang-config: contradicts --prefill-num-servers",
        ),
        ("--sglang-config nowhere.yaml", "--sglang-config: file 'nowhere.yaml' is not there"),
        (
            "--rollout-external-engine-addrs h:1 --sglang-config t.yaml",
            "--sglang-config: has no effect without engines of its own",
        ),
        (f"{TRAIN_ONLY} --sglang-config t.yaml", "--sglang-config: has no effect without an engine"),
        (f"{TRAIN_ONLY} --router-policy round_robin", "--router-policy: has no effect without an engine"),
        (f"{TRAIN_ONLY} --sglang-router-port 1", "--sglang-router-port: has no effect without an engine"),
        (f"{TRAIN_ONLY} --rollout-external-engine-addrs h:1", "-addrs: has no effect without an engine"),
    ],
)
def test_what_would_have_no_effect_is_refused(base, tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        load_config([*base, *words.split()])
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "words",
    [
        "--router-policy round_robin",
        "--sglang-router-port 7777",
        FOUND,
        f"{FOUND} --rollout-external-engine-addrs h:1",
        f"{FOUND} --sglang-config t.yaml --router-policy round_robin",
        "--sglang-config t.yaml --rollout-num-gpus 4",
    ],
)
def test_what_has_an_effect_passes(base, tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    load_config([*base, *words.split()])


@pytest.mark.parametrize(("policy", "warned"), [("round_robin", True), ("consistent_hashing", False)])
def test_a_policy_that_scatters_sessions_is_told(base, policy, warned):
    words = ["--custom-generate-function-path", "my.agent", "--router-policy", policy]
    told = [problem.message for problem in load_config([*base, *words]).warnings]
    assert any("sends each turn of a session to any engine" in text for text in told) is warned
    alone = load_config([*base, *words[2:]]).warnings
    assert not any("session" in problem.message for problem in alone)

"""Who takes how many GPUs and who sleeps when: what the flags of devices come to."""

import pytest

from slime.config import FULLY_ASYNC, load_config
from slime.config.device_sharing import share_devices
from slime.errors import ConfigError


@pytest.fixture
def base(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "data.jsonl").write_text('{"input": "1+1", "label": "2"}\n')
    return [
        *("--hf-checkpoint", str(tmp_path / "model")),
        *("--prompt-data", str(tmp_path / "data.jsonl"), "--rm-type", "math", "--label-key", "label"),
        *("--rollout-batch-size", "8", "--n-samples-per-prompt", "4"),
        *("--num-rollout", "10", "--rollout-max-response-len", "16"),
    ]


def shared(base, words, **kwargs):
    return share_devices(load_config([*base, *words.split()]), **kwargs)


def refused(base, words):
    with pytest.raises(ConfigError) as caught:
        load_config([*base, *words.split()])
    return str(caught.value)


@pytest.mark.parametrize(
    ("words", "train", "rollout"),
    [
        ("", False, False),
        ("--colocate", True, True),
        ("--offload", True, True),
        ("--offload-train", True, False),
        ("--offload-rollout", False, True),
        ("--colocate --no-offload-train", False, True),
        ("--colocate --no-offload-rollout", True, False),
        ("--colocate --no-offload-train --no-offload-rollout", False, False),
        ("--no-offload-train", False, False),
        ("--colocate --offload", True, True),
        ("--async-training", False, False),
        ("--async-training --no-offload-train", False, False),
        ("--debug-rollout-only", False, False),
        ("--rollout-external-engine-addrs h:1", False, False),
        ("--rollout-external-engine-addrs h:1 --offload-train", True, False),
    ],
)
def test_who_offloads(base, words, train, rollout):
    sharing = shared(base, words)
    assert (sharing.offload_train, sharing.offload_rollout) == (train, rollout)


@pytest.mark.parametrize(
    ("words", "train", "rollout"),
    [
        ("", True, True),
        ("--no-offload-rollout", True, False),
        ("--async-training", False, False),
        (f"--rollout-function-path {FULLY_ASYNC}", False, False),
    ],
)
def test_on_the_cpus_of_one_machine_both_offload_where_they_take_turns(base, words, train, rollout):
    sharing = shared(base, words, on_gpus=False)
    assert (sharing.offload_train, sharing.offload_rollout) == (train, rollout)


@pytest.mark.parametrize(
    ("words", "train", "rollout", "colocate"),
    [
        ("", 1, 1, False),
        ("--rollout-num-gpus-per-engine 2", 1, 2, False),
        ("--actor-num-gpus-per-node 4 --rollout-num-gpus 6", 4, 6, False),
        ("--actor-num-gpus-per-node 4 --colocate", 4, 4, True),
        ("--actor-num-gpus-per-node 4 --colocate --rollout-num-gpus 6", 4, 6, True),
        ("--actor-num-gpus-per-node 4 --debug-rollout-only", 0, 1, False),
        ("--rollout-num-gpus 0", 1, 0, False),
        ("--rollout-external-engine-addrs h:1", 1, 0, False),
    ],
)
def test_who_takes_how_many(base, words, train, rollout, colocate):
    sharing = shared(base, words)
    assert (sharing.train_gpus, sharing.rollout_gpus, sharing.colocate) == (train, rollout, colocate)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--offload --no-offload-train", "--offload: contradicts --no-offload-train"),
        ("--colocate --async-training", "--colocate: lets engines and trainer take turns"),
        ("--offload-rollout --async-training", "--offload-rollout: lets engines and trainer take turns"),
        ("--colocate --debug-rollout-only", "--colocate: has no effect without both an engine and a trainer"),
        ("--offload --debug-rollout-only", "--offload: has no effect without both"),
        ("--colocate --rollout-external-engine-addrs h:1", "--colocate: is not for external engines"),
        ("--rollout-num-gpus 2 --rollout-external-engine-addrs h:1", "--rollout-num-gpus: has no effect"),
        ("--rollout-num-gpus 3 --rollout-num-gpus-per-engine 2", "--rollout-num-gpus: 3 does not divide"),
        (
            "--actor-num-gpus-per-node 3 --colocate --rollout-num-gpus-per-engine 2",
            "2 does not divide the 3 GPUs of the trainer",
        ),
        ("--rollout-health-check-interval 5", "has no effect without --use-fault-tolerance"),
        ("--rollout-engine-restarts 5", "has no effect without --use-fault-tolerance"),
        ("--use-fault-tolerance --load-debug-rollout-data x", "--use-fault-tolerance: has no effect without"),
    ],
)
def test_what_cannot_be_is_refused(base, words, message):
    assert message in refused(base, words)


def test_one_port_is_not_for_several_engines(base):
    assert "is one port" in refused(base, "--rollout-num-gpus 2 --engine-port 31000")

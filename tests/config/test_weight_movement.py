"""Flags of weight movement: what each way needs, what has no effect, what contradicts."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from slime.config import load_config
from slime.config.serving_sections import WeightsConfig
from slime.config.weight_movement import choose_transport, request_fields, weight_movement
from slime.errors import ConfigError
from tests.config.test_device_sharing import base, refused  # noqa: F401

DELTA = "--update-weight-mode delta --update-weight-disk-dir /d --update-weight-local-checkpoint-dir /l"


def test_the_way_is_chosen_by_mode_and_machine():
    assert choose_transport(WeightsConfig(), one_machine=True) == "tensor"
    assert choose_transport(WeightsConfig(), one_machine=False) == "nccl"
    assert choose_transport(WeightsConfig(update_weight_mode="delta"), one_machine=True) == "disk"
    assert choose_transport(WeightsConfig(update_weight_transport="nccl"), one_machine=True) == "nccl"


def test_requests_name_the_adapter_only_where_engines_have_it():
    sglang = SimpleNamespace(update_weight_transport="lora", rollout_engine="sglang")
    assert request_fields(sglang) == {"lora_path": "slime"}
    assert request_fields(SimpleNamespace(update_weight_transport="lora", rollout_engine="embedded")) == {}
    assert request_fields(SimpleNamespace(update_weight_transport=None, rollout_engine="sglang")) == {}
    assert request_fields(SimpleNamespace()) == {}


@pytest.mark.parametrize(
    "words",
    [
        "--update-weight-transport nccl --update-weight-buffer-size 1000",
        "--update-weight-transport disk --update-weight-disk-dir /d --update-weight-disk-keep-files",
        f"{DELTA} --update-weight-delta-encoding overwrite --update-weight-delta-checksum adler32",
        "--update-weight-transport lora --update-weight-disk-dir /d --lora-rank 4",
        "--check-weight-update-equal --async-training --update-weights-interval 2",
    ],
)
def test_what_is_complete_is_taken(base, words):  # noqa: F811
    load_config([*base, *words.split()])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--update-weight-transport disk", "--update-weight-disk-dir"),
        ("--update-weight-transport lora --lora-rank 4", "--update-weight-disk-dir"),
        ("--update-weight-transport lora --update-weight-disk-dir /d", "--lora-rank"),
        ("--update-weight-mode delta", "--update-weight-local-checkpoint-dir"),
        (f"{DELTA} --update-weight-transport nccl", "whole weights"),
        ("--update-weight-disk-dir /d", "has no effect"),
        ("--update-weight-disk-keep-files", "has no effect"),
        ("--update-weight-delta-encoding overwrite", "has no effect"),
        ("--update-weight-local-checkpoint-dir /l", "has no effect"),
        ("--custom-update-weight-post-write-path a.b", "has no effect"),
        ("--update-weight-transport tensor --update-weight-buffer-size 9", "has no effect"),
        ("--debug-rollout-only --check-weight-update-equal", "has no effect"),
    ],
)
def test_what_is_missing_or_has_no_effect_is_told(base, words, said):  # noqa: F811
    assert said in refused(base, words)


def test_adapters_at_sglang_need_a_server_that_serves_them_and_rollouts_that_end(base):  # noqa: F811
    words = ["--update-weight-transport", "lora", "--update-weight-disk-dir", "/d", "--lora-rank", "4"]
    config = load_config([*base, *words])

    def told(sglang, **rollout):
        serving = replace(config.serving, rollout_engine="sglang")
        rollout = replace(config.rollout, **rollout)
        changed = replace(config, serving=serving, rollout=rollout, sglang=sglang)
        return [problem.message for problem in weight_movement(changed, frozenset())]

    assert told({"enable_lora": True}) == []
    assert ["serves adapters" in message for message in told({})] == [True]
    assert ["go on while training" in m for m in told({"enable_lora": True}, async_training=True)] == [True]


def test_the_error_is_one_of_configuration(base):  # noqa: F811
    with pytest.raises(ConfigError):
        load_config([*base, "--update-weight-mode", "delta"])

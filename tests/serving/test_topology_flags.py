"""The topology of a run follows from its flags; what cannot be laid out is refused by the flag."""

import pytest
import yaml

from slime.config import load_config
from slime.config.serving_sections import ServingConfig
from slime.errors import ConfigError
from slime.serving.engine_specs import plan_engines
from slime.serving.launch import LaunchSettings, Stand, embedded_config, sglang_launch
from slime.serving.topology_flags import topology_of, topology_of_run
from tests.config.fake_engine import fake_python
from tests.tiny import tiny_model_dir


def names(default_gpus=1, model_path="m", **flags):
    serving = ServingConfig(**({"rollout_engine": "embedded"} | flags))
    topology, warnings = topology_of(serving, model_path=model_path, default_gpus=default_gpus)
    assert warnings == []
    return [spec.name for spec in plan_engines(topology)]


def test_without_a_file_engines_are_alike():
    assert names() == ["default/regular-0"]
    assert names(default_gpus=2) == ["default/regular-0", "default/regular-1"]
    assert names(rollout_num_gpus=0) == []


def test_prefilling_servers_are_counted_and_the_others_decode(tmp_path):
    flags = {"rollout_engine": "sglang", "sglang_python": fake_python(tmp_path), "rollout_num_gpus": 6}
    found = names(prefill_num_servers=2, rollout_num_gpus_per_engine=2, **flags)
    assert found == ["default/prefill-0", "default/prefill-1", "default/decode-0"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"model_path": None}, "--hf-checkpoint: engines need a model"),
        (
            {"rollout_num_gpus_per_engine": 2},
            "per-engine: an embedded engine takes one slot",
        ),
        ({"prefill_num_servers": 1}, "--prefill-num-servers: the embedded engine knows no prefill servers"),
    ],
)
def test_what_embedded_engines_cannot_is_refused(flags, message):
    with pytest.raises(ConfigError, match=message):
        names(**flags)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"rollout_num_gpus": 3, "rollout_num_gpus_per_engine": 2}, "3 GPUs do not divide into engines of 2"),
        ({"rollout_num_gpus": 2, "prefill_num_servers": 2}, "leave none of 2 GPUs to decode"),
    ],
)
def test_counts_that_do_not_fit_are_refused(tmp_path, flags, message):
    with pytest.raises(ConfigError, match=message):
        names(rollout_engine="sglang", sglang_python=fake_python(tmp_path), **flags)


def specs_of(tmp_path, groups, **flags):
    path = tmp_path / "t.yaml"
    path.write_text(yaml.safe_dump({"sglang": [{"name": "a", "server_groups": groups}]}))
    serving = ServingConfig(sglang_config=str(path), **flags)
    return plan_engines(topology_of(serving, model_path="m")[0])


def test_overrides_are_checked_against_the_installed_sglang(tmp_path):
    python = fake_python(tmp_path)
    flags = {"rollout_engine": "sglang", "sglang_python": python}
    group = {"worker_type": "regular", "num_gpus": 4, "num_gpus_per_engine": 4}
    overrides = {"mem-fraction-static": 0.5, "pp_size": 2}
    (spec,) = specs_of(tmp_path, [group | {"overrides": overrides}], **flags)
    settings = LaunchSettings(kind="sglang", log_dir=tmp_path, python=python, seed=7)
    launch = sglang_launch(spec, settings, Stand())
    assert (launch.tp_size, launch.pp_size, launch.seed) == (2, 2, 7)
    assert launch.overrides == {"mem_fraction_static": 0.5, "pp_size": 2}
    for wrong, message in (
        ({"mem_fraction_statik": 1}, r"t.yaml:\d+: mem_fraction_statik: .*has no .*\n.*mem_fraction_static"),
        ({"mem_fraction_static": "much"}, "expects a number"),
        ({"tp-size": 2}, "tp-size: is not for overrides"),
        ({"disaggregation_mode": "decode"}, "worker_type says it"),
    ):
        with pytest.raises(ConfigError, match=message):
            specs_of(tmp_path, [group | {"overrides": wrong}], **flags)
    (odd,) = specs_of(tmp_path, [group | {"overrides": {"pp_size": 3}}], **flags)
    with pytest.raises(ConfigError, match="4 GPUs do not divide into 3 pipeline stages"):
        sglang_launch(odd, settings, Stand())


def test_a_prefilling_engine_gets_its_port_and_only_fields_that_the_version_has(tmp_path):
    python = fake_python(tmp_path)
    groups = [{"worker_type": kind, "num_gpus": 1} for kind in ("prefill", "decode")]
    prefill, decode = specs_of(tmp_path, groups, rollout_engine="sglang", sglang_python=python)
    settings = LaunchSettings(kind="sglang", log_dir=tmp_path, python=python)
    ports = {"disaggregation_mode": "prefill", "disaggregation_bootstrap_port": 9001}
    assert sglang_launch(prefill, settings, Stand(bootstrap_port=9001)).overrides == ports
    second = sglang_launch(decode, settings, Stand())
    assert second.overrides == {"disaggregation_mode": "decode"}
    assert second.seed == settings.seed + 1


def test_an_embedded_engine_is_configured_by_flags_and_overrides(tmp_path):
    group = {"worker_type": "regular", "num_gpus": 1, "overrides": {"max_running_requests": 3}}
    (spec,) = specs_of(tmp_path, [group], rollout_engine="embedded")
    config = embedded_config(spec, LaunchSettings(kind="embedded", log_dir=tmp_path), Stand())
    assert (config.max_running_requests, config.host, config.port) == (3, "127.0.0.1", None)


def run_words(folder, tmp_path):
    (tmp_path / "data.jsonl").write_text('{"input": "1+1", "label": "2"}\n')
    return [
        *("--hf-checkpoint", str(folder), "--rollout-engine", "embedded", "--dry-run"),
        *("--prompt-data", str(tmp_path / "data.jsonl"), "--rm-type", "math", "--label-key", "label"),
        *("--rollout-batch-size", "8", "--n-samples-per-prompt", "4"),
        *("--num-rollout", "10", "--rollout-max-response-len", "16"),
    ]


def test_a_dry_run_tells_the_topology_its_doubts_and_what_is_wrong_with_it(tmp_path, capsys):
    from slime.cli.train import main

    folder, path = tiny_model_dir(tmp_path / "model"), tmp_path / "t.yaml"
    groups = "server_groups: [{worker_type: regular, num_gpus: 2}, {worker_type: placeholder, num_gpus: 1}]"
    twin = f"{{name: twin, model_path: other, update_weights: true, {groups}}}"
    path.write_text(f"sglang:\n  - {{name: actor, {groups}}}\n  - {twin}\n")
    assert main([*run_words(folder, tmp_path), "--sglang-config", str(path)]) == 0
    told = capsys.readouterr().out
    assert (
        "served                  actor: 2 regular of 1 GPU, updated; twin: 2 regular of 1 GPU, updated"
        in told
    )
    assert f"warning: {path}:3: twin serves 'other', and gets the weights of '{folder}'" in told
    path.write_text("sglang: [{name: actor}]")
    with pytest.raises(ConfigError, match="t.yaml:1: actor has no server_groups"):
        main([*run_words(folder, tmp_path), "--sglang-config", str(path)])
    with pytest.raises(ConfigError, match="--rollout-num-gpus-per-engine"):
        main([*run_words(folder, tmp_path), "--rollout-num-gpus-per-engine", "2"])


def test_a_run_without_engines_of_its_own_has_a_topology_without_engines(tmp_path):
    folder = tiny_model_dir(tmp_path / "model")
    words = [*run_words(folder, tmp_path), "--rollout-external-engine-addrs", "h:1"]
    topology, warnings = topology_of_run(load_config(words))
    assert (topology.num_engines, topology.line(), warnings) == (0, "default: no engine, updated", [])

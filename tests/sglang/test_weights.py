"""Weights into real SGLang, two versions of it in one pool: by each way they compute what transformers
does.
"""

import os
import signal
import socket
import threading
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from slime.config.serving_sections import WeightsConfig
from slime.config.weight_movement import ADAPTER
from slime.errors import CapabilityError
from slime.serving.endpoint import EngineEndpoint
from slime.serving.sglang.command import EngineLaunch
from slime.serving.sglang.process import SGLangProcess
from slime.serving.weights.factory import make_weight_sync
from slime.serving.weights.probe import Probe
from tests.serving.weights.pool import PROMPT, ModelSource, StrikingSource, expected, scores
from tests.serving.wire import ok
from tests.sglang.install import OLDER_PYTHON, PYTHON
from tests.tiny import tiny_model, tiny_tokenizer

pytestmark = pytest.mark.slow
ROUNDING = 0.1
"""Of log-probs in bfloat16, by two implementations."""
SMALL = 40_000
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "qwen3"
    tiny_model("qwen3").to(torch.bfloat16).save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


def launch(folder, log, python, **flags):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    flags = {"max_total_tokens": 4096, "max_running_requests": 8, "skip_server_warmup": True} | flags
    start = EngineLaunch(model_path=str(folder), host="127.0.0.1", port=port, seed=1, flags=flags)
    return SGLangProcess(start, log, python=str(python))


@pytest.fixture(scope="module")
def servers(folder, tmp_path_factory):
    logs = tmp_path_factory.mktemp("logs")
    started = [launch(folder, logs / "newer.log", PYTHON), launch(folder, logs / "older.log", OLDER_PYTHON)]
    yield started
    for server in started:
        server.stop()


@pytest.fixture(scope="module")
def pool(servers):
    return [
        EngineEndpoint(name=name, url=server.url, kind="sglang")
        for name, server in zip(("newer", "older"), servers, strict=True)
    ]


versions = iter(range(1, 10**6))


@pytest.fixture
def source(folder):
    return StrikingSource(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16))


def make(folder, source, way, tmp_path, **options):
    flags = {}
    if way in ("disk", "delta", "lora"):
        flags["update_weight_disk_dir"] = str(tmp_path / "published")
    if way == "delta":
        flags["update_weight_mode"] = "delta"
        flags["update_weight_local_checkpoint_dir"] = str(tmp_path / "local")
    transport = "disk" if way == "delta" else way
    config = WeightsConfig(update_weight_transport=transport, update_weight_buffer_size=SMALL, **flags)
    options = {"timeout": 120.0, "engine_kind": "sglang", "one_machine": True} | options
    return make_weight_sync(config, source=source, hf_checkpoint=str(folder), **options)


def check(endpoints, model, version):
    for endpoint in endpoints:
        found, named = scores(endpoint.url)
        assert named == version
        assert found == pytest.approx(expected(model), abs=ROUNDING)


@pytest.mark.parametrize("way", ["tensor", "nccl", "disk", "delta"])
def test_engines_compute_with_the_trainers_weights(folder, pool, source, tmp_path, way):
    sync = make(folder, source, way, tmp_path)
    sync.connect(pool)
    for pause in ("abort", "in_place"):
        version = next(versions)
        source.change(version)
        before = scores(pool[0].url)[0]
        report = sync.update(version, pause)
        assert report.failed == {}
        check(pool, source.model, str(version))
        moved = sum(abs(a - b) for a, b in zip(before, expected(source.model), strict=True)) / len(before)
        assert moved > ROUNDING  # what is compared would show that nothing moved
        assert report.metrics["perf/update_weights_bytes"] == 2 * sum(
            p.numel() for p in source.model.parameters()
        )
    sync.close()


@pytest.mark.parametrize("way", ["tensor", "nccl", "disk"])
@pytest.mark.parametrize("pause", ["abort", "in_place", "retract"])
def test_requests_in_flight_end_or_go_on_as_the_pause_says(folder, pool, source, tmp_path, way, pause):
    newer, url, answers = pool[:1], pool[0].url, []
    sync = make(folder, source, way, tmp_path)
    sync.connect(newer)
    first, second = next(versions), next(versions)
    sync.update(first, "abort")

    def ask():
        params = {"max_new_tokens": 1000, "ignore_eos": True}
        answers.append(ok(url, "/generate", {"input_ids": [70, 71], "sampling_params": params}))

    request = threading.Thread(target=ask)
    request.start()
    while not ok(url, "/v1/loads")["loads"][0]["num_running_reqs"]:
        time.sleep(0.02)
    assert sync.update(second, pause).failed == {}
    request.join()
    meta = answers[0]["meta_info"]
    seen = [span["version"] for span in meta["weight_versions"]]
    if pause == "abort":
        assert (meta["finish_reason"]["type"], seen) == ("abort", [str(first)])
    else:
        assert meta["completion_tokens"] == 1000
        assert seen == [str(first), str(second)]
    sync.close()


def test_a_pause_that_the_older_would_not_survive_is_refused_by_name(folder, pool, source, tmp_path):
    sync = make(folder, source, "tensor", tmp_path)
    sync.connect(pool)
    first, second = next(versions), next(versions)
    assert sync.update(first, "abort").failed == {}
    with pytest.raises(CapabilityError, match=r"0\.5\.15.*retract") as caught:
        sync.update(second, "retract")
    assert "stay paused" not in str(caught.value)
    check(pool, source.model, str(first))
    sync.close()


def test_what_engines_compute_is_compared_with_the_trainer(folder, pool, source, tmp_path):
    def updated(score):
        sync = make(folder, source, "tensor", tmp_path, probe=Probe(score, PROMPT, ROUNDING))
        sync.connect(pool)
        report = sync.update(next(versions), "abort")
        sync.close()
        return report

    assert updated(lambda _: expected(source.model)).failed == {}
    report = updated(lambda _: [-1.0] * (len(PROMPT) - 1))
    assert sorted(report.failed) == ["newer", "older"]
    assert "differ from the trainer's" in report.failed["newer"]


class AdapterSource(ModelSource):
    """A model with adapters."""

    def __init__(self, model):
        from peft import LoraConfig, get_peft_model

        super().__init__(model)
        self.adapted = get_peft_model(model, LoraConfig(r=4, target_modules=TARGETS, task_type="CAUSAL_LM"))

    def change(self, seed):
        torch.manual_seed(seed)
        with torch.no_grad():
            for name, parameter in self.adapted.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(0, 0.2)

    def save_adapter(self, folder):
        self.adapted.save_pretrained(folder)


def test_adapters_alone_are_loaded_and_named_by_requests(folder, tmp_path, monkeypatch):
    source = AdapterSource(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16))
    shim = str(Path(__file__).parent / "lora_shim")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([shim, os.environ.get("PYTHONPATH", "")]))
    flags = {"enable_lora": True, "max_lora_rank": 4, "lora_target_modules": TARGETS}
    flags |= {"lora_backend": "torch_native", "max_loras_per_batch": 2}
    server = launch(folder, tmp_path / "lora.log", PYTHON, **flags)
    try:
        sync = make(folder, source, "lora", tmp_path)
        sync.connect([EngineEndpoint(name="engine", url=server.url, kind="sglang")])
        fields = {"lora_path": ADAPTER}
        for version in (1, 2):
            source.change(version)
            report = sync.update(version, "abort")
            assert report.failed == {}
            body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 0}, "logprob_start_len": 0}
            meta = ok(server.url, "/generate", body | {"return_logprob": True} | fields)["meta_info"]
            assert meta["weight_version"] == str(version)
            found = [value for value, *_ in meta["input_token_logprobs"][1:]]
            assert found == pytest.approx(expected(source.adapted), abs=ROUNDING)
            base = scores(server.url)[0]
            assert max(abs(a - b) for a, b in zip(base, found, strict=True)) > ROUNDING
    finally:
        server.stop()


def test_an_engine_that_dies_in_the_middle_costs_the_other_nothing(folder, pool, servers, source, tmp_path):
    """The last: it leaves one server."""
    sync = make(folder, source, "nccl", tmp_path, timeout=60.0)
    sync.connect(pool)
    first, second = next(versions), next(versions)
    assert sync.update(first, "abort").failed == {}
    source.change(second)
    source.strike = lambda: os.kill(servers[1].pid, signal.SIGKILL)
    started = time.monotonic()
    report = sync.update(second, "abort")
    assert time.monotonic() - started < 60.0
    assert list(report.failed) == ["older"]
    check(pool[:1], source.model, str(second))
    sync.close()

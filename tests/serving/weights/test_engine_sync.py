"""Weights by each way into embedded engines: what they compute then, whom an update leaves out, and why."""

import pytest
from transformers import AutoModelForCausalLM

from slime.errors import ModelError
from slime.serving.weights.probe import Probe
from slime.serving.weights.shared import SharedWeights
from tests.serving.embedded.harness import request, send
from tests.serving.weights.pool import (
    PROMPT,
    ModelSource,
    SleepingSource,
    StrikingSource,
    check,
    engines,
    expected,
    make,
    scores,
)
from tests.serving.wire import call, ok
from tests.tiny import tiny_model, tiny_model_dir


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model_dir(tmp_path_factory.mktemp("model") / "m", seed=0)


@pytest.mark.parametrize("transport", ["tensor", "nccl", "disk"])
def test_weights_of_a_trainer_that_sleeps_are_lent_for_the_update(folder, tmp_path, transport):
    source = SleepingSource(tiny_model(seed=3))
    with engines(folder) as pool:
        sync = make(folder, source, transport, update_weight_disk_dir=str(tmp_path / "versions"))
        sync.connect([endpoint for _, endpoint in pool])
        source.fall_asleep()
        for version in ("1", "2"):
            assert sync.update(int(version), "abort").failed == {}
            assert not source.is_awake
            with source.present():
                check(pool, source.model, version)
        sync.close()


@pytest.mark.parametrize("transport", ["tensor", "nccl"])
def test_engines_compute_with_the_weights_of_the_moment(folder, transport):
    source = ModelSource(tiny_model(seed=3))
    with engines(folder, 2) as pool:
        sync = make(folder, source, transport)
        sync.connect([endpoint for _, endpoint in pool])
        for version in (1, 2):
            source.change(version)
            report = sync.update(version, "abort")
            assert report.failed == {}
            check(pool, source.model, str(version))
            assert (
                0
                < report.metrics["perf/update_weights_pause_time"]
                <= report.metrics["perf/update_weights_time"]
            )
            assert report.metrics["perf/update_weights_bytes"] == 4 * sum(
                p.numel() for p in source.model.parameters()
            )
        assert source.passes == 2
        sync.close()


@pytest.mark.parametrize("mode", ["full", "delta"])
@pytest.mark.parametrize("pulls", [True, False])
def test_engines_load_or_pull_files_and_the_files_go(folder, tmp_path, mode, pulls):
    source, written = ModelSource(tiny_model(seed=0)), []
    flags = {"update_weight_disk_dir": str(tmp_path / "published"), "update_weight_mode": mode}
    if pulls or mode == "delta":
        flags["update_weight_local_checkpoint_dir"] = str(tmp_path / "local")

    def hook(path, endpoints):
        written.append((path.name, len(list(path.glob("*.safetensors"))), [e.name for e in endpoints]))

    with engines(folder, 2) as pool:
        sync = make(folder, source, "disk", after_write=hook, **flags)
        sync.connect([endpoint for _, endpoint in pool])
        for version in (1, 2):
            source.change(version)
            report = sync.update(version, "abort")
            assert report.failed == {}
            check(pool, source.model, str(version))
            if mode == "delta":
                assert 0.5 < report.metrics["perf/update_weights_density"] <= 1
        assert [name for name, *_ in written] == ["weight_v000001", "weight_v000002"]
        assert written[0][1] > 1 and written[0][2] == ["engine-0", "engine-1"]
        assert [*(tmp_path / "published").iterdir()] == []
        assert (tmp_path / "local").is_symlink() == (pulls or mode == "delta")
        sync.close()


def test_versions_are_kept_where_they_are_to_be(folder, tmp_path):
    source = ModelSource(tiny_model(seed=3))
    root = tmp_path / "published"
    with engines(folder) as pool:
        sync = make(
            folder, source, "disk", update_weight_disk_dir=str(root), update_weight_disk_keep_files=True
        )
        sync.connect([endpoint for _, endpoint in pool])
        sync.update(1, "abort")
        sync.update(2, "abort")
    assert sorted(path.name for path in root.iterdir()) == ["weight_v000001", "weight_v000002"]
    kept = AutoModelForCausalLM.from_pretrained(root / "weight_v000002")
    assert expected(kept) == pytest.approx(expected(source.model), abs=1e-6)


def test_an_engine_that_joins_a_chain_of_deltas_is_brought_to_the_moment(folder, tmp_path):
    source = ModelSource(tiny_model(seed=0))
    flags = {"update_weight_disk_dir": str(tmp_path / "p"), "update_weight_mode": "delta"}
    flags["update_weight_local_checkpoint_dir"] = str(tmp_path / "local")
    with engines(folder, 2) as pool:
        endpoints = [endpoint for _, endpoint in pool]
        sync = make(folder, source, "disk", **flags)
        sync.connect(endpoints[:1])
        for version in (1, 2, 3):
            source.change(version)
            if version == 3:
                sync.connect(endpoints)
            assert sync.update(version, "abort").failed == {}
        check(pool, source.model, "3")


def test_a_trainers_own_file_is_followed_without_copies(folder):
    source = ModelSource(tiny_model(seed=3))
    shared = SharedWeights.create(source.model.named_parameters())
    for name, parameter in source.model.named_parameters():
        parameter.data = shared.views[name]
    shared.hide()
    with engines(folder) as pool:
        sync = make(folder, source, "tensor", shared=shared, aliases=True)
        sync.connect([endpoint for _, endpoint in pool])
        assert sync.update(1, "abort").failed == {}
        check(pool, source.model, "1")
        source.change(5)
        check(pool, source.model, "1")
    shared.unlink()


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_requests_in_flight_go_on_behind_the_update(folder, mode):
    source = ModelSource(tiny_model(seed=3))
    with engines(folder) as pool:
        sync = make(folder, source, "nccl")
        sync.connect([endpoint for _, endpoint in pool])
        sync.update(1, "abort")
        inbox = send(pool[0][0]._engine, request([70, 71], max_new_tokens=100, stream=True), hold=1)
        inbox.tokens(1)
        assert sync.update(2, mode).failed == {}
        answer = inbox.result()
        assert len(answer.output_ids) == 100
        assert [span["version"] for span in answer.weight_versions] == ["1", "2"]
        sync.close()


@pytest.mark.parametrize("transport", ["tensor", "nccl", "disk"])
def test_no_prefix_of_older_weights_is_reused_after_an_update_in_place(folder, tmp_path, transport):
    source = ModelSource(tiny_model(seed=3))
    files = {"update_weight_disk_dir": str(tmp_path)} if transport == "disk" else {}
    params = {"max_new_tokens": 1, "temperature": 0.0}
    with engines(folder) as pool:
        ((_, endpoint),) = pool
        sync = make(folder, source, transport, **files)
        sync.connect([endpoint])
        sync.update(1, "abort")
        ok(endpoint.url, "/generate", {"input_ids": PROMPT * 8, "sampling_params": params})
        source.change(5)
        assert sync.update(2, "in_place").failed == {}
        body = {"input_ids": PROMPT * 8, "sampling_params": params}
        assert ok(endpoint.url, "/generate", body)["meta_info"]["cached_tokens"] == 0
        sync.close()


@pytest.mark.parametrize("transport", ["tensor", "nccl"])
def test_a_dead_engine_is_named_and_the_others_get_the_weights(folder, transport):
    source = ModelSource(tiny_model(seed=3))
    with engines(folder, 3) as pool:
        sync = make(folder, source, transport)
        sync.connect([endpoint for _, endpoint in pool])
        sync.update(1, "abort")
        pool[1][0].kill()
        pool[1][0].stop()  # waits until the port is closed
        source.change(1)
        report = sync.update(2, "abort")
        assert list(report.failed) == ["engine-1"]
        assert "Connect" in report.failed["engine-1"]
        check(pool, source.model, "2", failed=["engine-1"])
        sync.close()


@pytest.mark.parametrize("transport", ["tensor", "nccl"])
def test_an_engine_that_dies_in_the_middle_costs_the_others_nothing(folder, transport):
    source = StrikingSource(tiny_model(seed=3))
    with engines(folder, 3) as pool:
        sync = make(folder, source, transport, timeout=10.0)
        sync.connect([endpoint for _, endpoint in pool])
        sync.update(1, "abort")
        source.change(1)
        source.strike = pool[1][0].kill
        report = sync.update(2, "abort")
        assert list(report.failed) == ["engine-1"]
        check(pool, source.model, "2", failed=["engine-1"])
        assert source.passes == 2
        sync.close()


def test_a_trainers_own_failure_ends_the_update_with_it(folder):
    source = StrikingSource(tiny_model(seed=3))

    def fail():
        raise ModelError("the trainer failed")

    source.strike = fail
    with engines(folder) as pool:
        before = scores(pool[0][1].url)
        sync = make(folder, source, "nccl")
        sync.connect([endpoint for _, endpoint in pool])
        with pytest.raises(ModelError, match="the trainer failed"):
            sync.update(1, "abort")
        url = pool[0][1].url
        status, answer = call(url, "/end_weight_update", {})
        assert status == 400 and "no new value for weight" in answer["message"]
        ok(url, "/continue_generation", {})
        assert scores(url) == before
        sync.close()


@pytest.mark.parametrize("transport", ["tensor", "nccl"])
def test_a_session_that_a_dead_trainer_left_open_is_given_up(folder, transport):
    source = ModelSource(tiny_model(seed=3))
    with engines(folder) as pool:
        ok(pool[0][1].url, "/begin_weight_update", {})
        sync = make(folder, source, transport)
        sync.connect([endpoint for _, endpoint in pool])
        assert sync.update(1, "abort").failed == {}
        check(pool, source.model, "1")
        sync.close()


def test_engines_that_compute_something_else_are_told_by_the_probe(folder):
    source = ModelSource(tiny_model(seed=3))
    with engines(folder, 2) as pool:
        for score, failed in ((lambda _: expected(source.model), 0), (lambda _: [-1.0] * 7, 2)):
            sync = make(folder, source, "tensor", probe=Probe(score, PROMPT, 1e-3))
            sync.connect([endpoint for _, endpoint in pool])
            report = sync.update(1, "abort")
            assert len(report.failed) == failed
            assert all("differ from the trainer's" in reason for reason in report.failed.values())
            sync.close()


def test_an_engine_that_joins_is_updated_with_the_others(folder):
    source = ModelSource(tiny_model(seed=3))
    with engines(folder, 2) as pool:
        endpoints = [endpoint for _, endpoint in pool]
        sync = make(folder, source, "nccl")
        sync.connect(endpoints[:1])
        sync.update(1, "abort")
        sync.connect(endpoints)
        assert sync.update(2, "abort").failed == {}
        check(pool, source.model, "2")
        sync.close()


def test_weights_of_another_model_are_refused_before_an_engine_changes(folder):
    source = ModelSource(tiny_model(seed=3, hidden_size=32))
    with engines(folder) as pool:
        before = scores(pool[0][1].url)
        sync = make(folder, source, "nccl")
        sync.connect([endpoint for _, endpoint in pool])
        report = sync.update(1, "abort")
        assert "shape" in report.failed["engine-0"]
        ok(pool[0][1].url, "/continue_generation", {})
        assert scores(pool[0][1].url) == before
        sync.close()


def test_ranks_that_talk_to_no_engine_go_through_the_weights_too(folder):
    source = ModelSource(tiny_model(seed=3))
    with engines(folder) as pool:
        for transport in ("tensor", "nccl"):
            sync = make(folder, source, transport, is_first=False)
            sync.connect([endpoint for _, endpoint in pool])
            assert sync.update(1, "abort").metrics == {}
        assert source.passes == 2
        assert scores(pool[0][1].url)[1] == "default"


def test_names_that_the_engines_checkpoint_lacks_are_told(folder):
    source = ModelSource(tiny_model(seed=3, num_hidden_layers=3))
    with engines(folder) as pool:
        sync = make(folder, source, "tensor", engine_kind="sglang")
        sync.connect([endpoint for _, endpoint in pool])
        with pytest.raises(ModelError, match=r"layers.2"):
            sync.update(1, "abort")


def test_the_probe_computes_while_the_weights_are_lent_on_all_ranks_before_they_are_sent(folder):
    source, orders = SleepingSource(tiny_model(seed=3)), []
    with engines(folder) as pool:
        source.fall_asleep()
        for is_first in (True, False):
            order = []

            def score(_, order=order):
                order.append(("probe", source.is_awake, source.passes))
                return expected(source.model)

            probe = Probe(score, PROMPT, 1e-3)
            source.passes = 0
            sync = make(folder, source, "tensor", probe=probe, is_first=is_first)
            sync.connect([endpoint for _, endpoint in pool])
            assert sync.update(1, "abort").failed == {}
            orders.append(order)
            sync.close()
    assert orders == [[("probe", True, 0)]] * 2

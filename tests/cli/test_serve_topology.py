"""`slime serve --config`: a topology as a user and as a parent process see it."""

import json
import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from slime.cli.serve import main
from slime.cli.serve_topology import choose_router, parse
from slime.config.serving_sections import ServingConfig
from slime.errors import ConfigError, EngineError
from slime.serving.engine_specs import plan_engines
from slime.serving.launch import Stand, sglang_launch
from slime.serving.router_client import RouterClient
from slime.serving.topology_flags import topology_of
from tests.config.fake_engine import fake_python
from tests.serving.routing import ask, background_router, engines
from tests.serving.wire import wait_for
from tests.tiny import tiny_model_dir

TOPOLOGY = """\
sglang:
  - name: actor
    server_groups:
      - {worker_type: placeholder, num_gpus: 1}
      - {worker_type: regular, num_gpus: 2, overrides: {max_running_requests: 3}}
  - name: judge
    model_path: models/judge
    server_groups: []
"""
EMBEDDED = ["--rollout-engine", "embedded"]


@pytest.fixture
def topology(tmp_path):
    path = tmp_path / "topology.yaml"
    path.write_text(TOPOLOGY)
    return str(path)


def test_flags_and_file_make_one_plan(topology):
    request = parse(
        ["--config", topology, *EMBEDDED, "--hf-checkpoint", "m", "--engine-context-length", "99"]
    )
    assert [model.name for model in request.topology.models] == ["actor", "judge"]
    assert request.settings.kind == "embedded"
    assert request.settings.embedded.context_length == 99
    assert request.settings.embedded.num_threads == max((os.cpu_count() or 1) // 2, 1)
    words = [f"--config={topology}", *EMBEDDED, "--hf-checkpoint=m", "--router-policy", "round_robin"]
    again = parse([*words, "--sglang-router-port", "7777"])
    first, second = (choose_router(model, again) for model in again.topology.models)
    assert (first.port, second.port) == (7777, None)
    assert first.plan.policy == second.plan.policy == "round_robin"


def test_a_router_that_runs_is_the_first_models(topology):
    found = ["--sglang-router-ip", "10.0.0.1", "--sglang-router-port", "7777"]
    request = parse(["--config", topology, *EMBEDDED, "--hf-checkpoint", "m", *found])
    first, second = (choose_router(model, request) for model in request.topology.models)
    assert (first.running_url, first.plan) == ("http://10.0.0.1:7777", None)
    assert second.running_url is None


@pytest.fixture
def sglang_words(tmp_path):
    """A topology of one group, which gives what a run's flags stand for, and an SGLang."""
    path = tmp_path / "sglang.yaml"
    path.write_text(TOPOLOGY.replace("max_running_requests: 3", "enable_return_routed_experts: true"))
    return ["--config", str(path), "--hf-checkpoint", "m", "--sglang-python", fake_python(tmp_path)]


def test_what_no_flag_of_a_run_stands_for_is_given_itself(sglang_words):
    words = ["--sglang-enable-return-routed-experts", "--sglang-enable-memory-saver"]
    request = parse([*sglang_words, *words])
    launch = sglang_launch(plan_engines(request.topology)[0], request.settings, Stand())
    assert (launch.return_routed_experts, launch.memory_saver) == (True, True)


def test_one_group_may_have_it(sglang_words):
    request = parse(sglang_words)
    launch = sglang_launch(plan_engines(request.topology)[0], request.settings, Stand())
    assert (launch.return_routed_experts, launch.memory_saver) == (False, False)
    assert launch.overrides == {"enable_return_routed_experts": True}


def test_a_run_refuses_it_in_a_topology_too(sglang_words):
    serving = ServingConfig(
        rollout_engine="sglang", sglang_python=sglang_words[-1], sglang_config=sglang_words[1]
    )
    with pytest.raises(ConfigError, match="give --use-rollout-routing-replay"):
        topology_of(serving, model_path="m")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--rollout-num-gpus", "4"], "the groups take 3 GPUs, and --rollout-num-gpus is 4"),
        (["--engine-port", "1"], "unknown flag 'engine-port'"),
        (["--colocate"], "unknown flag 'colocate'"),
        (["--sglang-router-ip", "10.0.0.1"], "--sglang-router-ip: needs --sglang-router-port"),
    ],
)
def test_what_cannot_be_served_is_refused(topology, words, message):
    with pytest.raises(ConfigError, match=message):
        main(["--config", topology, *EMBEDDED, "--hf-checkpoint", "m", *words])


def test_problems_of_the_file_come_with_their_line(topology):
    Path(topology).write_text(TOPOLOGY.replace("max_running_requests", "max_runing_requests"))
    with pytest.raises(
        ConfigError, match=r"topology.yaml:5: max_runing_requests: .*\n.*max_running_requests"
    ):
        main(["--config", topology, *EMBEDDED, "--hf-checkpoint", "m"])


def test_routers_are_served_without_engines_and_end_at_a_signal(tmp_path):
    ready, topology = tmp_path / "ready.json", tmp_path / "t.yaml"
    topology.write_text("sglang: [{name: a, server_groups: []}, {name: b, server_groups: []}]")
    words = ["--config", str(topology), *EMBEDDED, "--hf-checkpoint", "m", "--ready-file", str(ready)]
    with engines(1) as (one,), _started([*words, "--log-dir", str(tmp_path / "logs")]) as child:
        wait_for(lambda: ready.exists() or child.poll() is not None, 60)
        urls = {name: model["url"] for name, model in json.loads(ready.read_text())["models"].items()}
        RouterClient(urls["b"]).add(one.url)
        assert ask(urls["b"])["output_ids"] == ask(one.url)["output_ids"]
        child.send_signal(signal.SIGTERM)
        assert child.wait(30) == 0
        assert [RouterClient(url).health() for url in urls.values()] == [False, False]
        assert child.stdout.read().count(" ready on http://127.0.0.1:") == 2


@pytest.mark.slow
def test_an_engine_that_does_not_start_ends_the_verb_with_its_log(topology, tmp_path):
    words = ["--config", topology, *EMBEDDED, "--hf-checkpoint", "no-such-model", "--log-dir", str(tmp_path)]
    with pytest.raises(EngineError, match=r"(?s)did not start.*no-such-model"):
        main(words)


@pytest.mark.slow
def test_a_topology_is_served_survives_a_death_and_ends_cleanly(topology, tmp_path):
    model, ready = tiny_model_dir(tmp_path / "model"), tmp_path / "ready.json"
    words = ["--config", topology, *EMBEDDED, "--hf-checkpoint", str(model), "--ready-file", str(ready)]
    with _started([*words, "--log-dir", str(tmp_path / "logs")]) as child:
        wait_for(lambda: ready.exists() or child.poll() is not None, 120)
        models = json.loads(ready.read_text())["models"]
        assert set(models) == {"actor", "judge"}
        actor = models["actor"]
        first, second = actor["engines"]
        assert [first["name"], second["name"]] == ["actor/regular-0", "actor/regular-1"]
        client = RouterClient(actor["url"])
        assert {worker.url for worker in client.workers()} == {first["url"], second["url"]}
        assert len(ask(actor["url"])["output_ids"]) <= 4
        assert RouterClient(models["judge"]["url"]).workers() == ()

        os.kill(first["pid"], signal.SIGKILL)
        wait_for(lambda: [worker.url for worker in client.workers()] == [second["url"]])
        assert len(ask(actor["url"])["output_ids"]) <= 4
        child.send_signal(signal.SIGTERM)
        assert child.wait(30) == 0
        out, err = child.communicate()
    assert f"slime serve: actor ready on {actor['url']}\n" in out
    assert "actor/regular-0 is gone" in err
    assert "was killed by signal 9" in err
    assert not any(_runs(engine["pid"]) for engine in actor["engines"])


@pytest.mark.slow
def test_the_last_engine_of_a_model_ends_the_verb_and_a_found_router_runs_on(tmp_path):
    model, ready, topology = tiny_model_dir(tmp_path / "model"), tmp_path / "ready.json", tmp_path / "t.yaml"
    topology.write_text("sglang: [{name: a, server_groups: [{worker_type: regular, num_gpus: 1}]}]")
    words = ["--config", str(topology), *EMBEDDED, "--hf-checkpoint", str(model), "--ready-file", str(ready)]
    with engines(1) as (other,), background_router([other]) as router:
        host, port = router.url.removeprefix("http://").split(":")
        words += ["--sglang-router-ip", host, "--sglang-router-port", port, "--log-dir", str(tmp_path)]
        with _started(words) as child:
            wait_for(lambda: ready.exists() or child.poll() is not None, 120)
            (engine,) = json.loads(ready.read_text())["models"]["a"]["engines"]
            assert {worker.url for worker in router.client.workers()} == {engine["url"], other.url}
            os.kill(engine["pid"], signal.SIGKILL)
            _, err = child.communicate(timeout=30)
            assert child.returncode == 2
        assert "a has no regular engine left" in err
        assert [worker.url for worker in router.client.workers()] == [other.url]


@contextmanager
def _started(words):
    """The verb as a child that does not outlive a failing test."""
    command = [sys.executable, "-m", "slime.cli", "serve", *words]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as child:
        try:
            yield child
        finally:
            child.kill()


def _runs(pid):
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False

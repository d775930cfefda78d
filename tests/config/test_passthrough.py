"""Flags of the engine and of its router are those of the installed programs, checked like slime's own."""

import pickle

import pytest
import yaml

from slime.config import load_config
from slime.config.passthrough import table_of
from slime.errors import ConfigError
from tests.config.fake_engine import fake_python, imports


@pytest.fixture
def base(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "data.jsonl").write_text('{"input": "1+1", "label": "2"}\n')
    return [
        *("--hf-checkpoint", str(tmp_path / "model")),
        *("--prompt-data", str(tmp_path / "data.jsonl")),
        *("--rollout-batch-size", "8", "--n-samples-per-prompt", "4"),
        *("--num-rollout", "10", "--rollout-max-response-len", "16"),
    ]


@pytest.fixture
def python(tmp_path):
    return fake_python(tmp_path)


@pytest.fixture
def argv(base, python):
    return [*base, "--sglang-python", python]


def refused(argv):
    with pytest.raises(ConfigError) as caught:
        load_config(argv)
    return str(caught.value)


def test_values_arrive_typed_in_the_configuration_and_on_args(argv):
    words = [
        "--sglang-mem-fraction-static",
        "0.5",
        "--sglang-enable-metrics",
        "--sglang-cuda-graph-bs",
        "1",
        "2",
    ]
    words += ["--sglang-disable-overlap", "--no-sglang-strict", "--sglang-chat-kwargs", '{"a": 1}']
    config = load_config([*argv, *words, "--router-policy", "random"])
    assert config.sglang == {
        "mem_fraction_static": 0.5,
        "enable_metrics": True,
        "cuda_graph_bs": [1, 2],
        "overlap": False,
        "strict": False,
        "chat_kwargs": {"a": 1},
    }
    assert config.router == {"policy": "random"}
    args = config.args()
    assert (args.sglang_mem_fraction_static, args.sglang_overlap, args.sglang_log_level) == (
        0.5,
        False,
        "info",
    )
    assert (args.router_policy, args.router_cb_failure_threshold) == ("random", 10)
    assert args.rollout_engine == "sglang"
    assert pickle.loads(pickle.dumps(config)) == config


def test_a_flag_that_repeats_its_default_was_said_all_the_same(argv):
    assert load_config([*argv, "--sglang-log-level", "info"]).sglang == {"log_level": "info"}


def test_every_spelling_of_a_flag_is_one_flag(argv):
    for name in ("pipeline-parallel-size", "pp-size"):
        assert load_config([*argv, f"--sglang-{name}", "2"]).sglang == {"pp_size": 2}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--sglang-mem-fraction-static", "much"],
            "--sglang-mem-fraction-static: expects a number, got 'much'",
        ),
        (["--sglang-attention-backend", "tritn"], "must be one of triton, torch_native"),
        (["--sglang-page-size", "3"], "must be one of 1, 64"),
        (["--sglang-mem-fraction-statc", "0.5"], "did you mean 'sglang-mem-fraction-static'?"),
        (["--sglang-tp-size", "2"], "slime sets 'sglang-tp-size'(.|\n)*--rollout-num-gpus-per-engine"),
        (["--sglang-tensor-parallel-size", "2"], "--rollout-num-gpus-per-engine"),
        (["--sglang-model-path", "x"], "give --hf-checkpoint"),
        (["--sglang-enable-memory-saver"], "give --offload-rollout"),
        (["--sglang-enable-return-routed-experts"], "give --use-rollout-routing-replay"),
        (["--router-host", "x"], "slime sets 'router-host'(.|\n)*--sglang-router-ip"),
        (["--router-policy", "best"], "must be one of random, cache_aware, consistent_hashing"),
        (["--router-polcy", "random"], "did you mean 'router-policy'?"),
    ],
)
def test_what_the_program_would_refuse_is_refused_at_once(argv, words, message):
    with pytest.raises(ConfigError, match=message.replace("?", r"\?")):
        load_config([*argv, *words])


def test_the_router_is_given_what_only_its_python_interface_takes(argv):
    assert (
        load_config([*argv, "--router-policy", "consistent_hashing"]).router["policy"] == "consistent_hashing"
    )


def test_a_file_says_the_same_and_its_errors_have_lines(base, python, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(
        f"sglang-python: {python}\nsglang_mem_fraction_static: 0.5\nsglang-enable-metrics: true\n"
    )
    config = load_config([*base, "--config", str(file)])
    assert config.sglang == {"mem_fraction_static": 0.5, "enable_metrics": True}
    file.write_text(f"sglang-python: {python}\nsglang-tp-size: 2\n")
    assert f"{file}:2: slime sets 'sglang-tp-size'" in refused([*base, "--config", str(file)])
    file.write_text(f"sglang-python: {python}\n\nsglang-page-size: two\n")
    assert f"{file}:3: sglang-page-size: expects a whole number" in refused([*base, "--config", str(file)])


def test_a_configuration_says_itself_again(argv, base, tmp_path):
    config = load_config(
        [*argv, "--sglang-disable-overlap", "--sglang-pp-size", "2", "--router-policy", "random"]
    )
    file = tmp_path / "again.yaml"
    file.write_text(yaml.safe_dump(config.flags()))
    again = load_config([*base, "--config", str(file)])
    assert (again.sglang, again.router) == (config.sglang, config.router)


def test_slimes_own_flags_of_such_names_ask_no_program(base, tmp_path):
    fake_python(tmp_path)
    config = load_config(
        [*base, "--sglang-server-concurrency", "3", "--sglang-router-request-timeout-secs", "9"]
    )
    assert config.rollout.sglang_server_concurrency == 3
    assert config.serving.rollout_engine == "embedded"
    assert config.sglang == config.router == {}
    assert imports(tmp_path) == 0


def test_without_the_program_its_flag_says_how_to_install_it(base, tmp_path):
    python = fake_python(tmp_path, version=None)
    text = refused([*base, "--sglang-python", python, "--sglang-page-size", "64"])
    assert "--sglang-page-size: sglang is not installed" in text
    assert "pip install sglang" in text


@pytest.mark.parametrize("words", ["--rollout-engine sglang", ""])
def test_an_engine_that_is_not_installed_is_told_before_a_run(base, tmp_path, words):
    python = fake_python(tmp_path, version=None)
    text = refused(
        [*base, "--rm-type", "math", "--label-key", "l", "--sglang-python", python, *words.split()]
    )
    assert "--rollout-engine: sglang is not installed for" in text
    assert "pip install sglang" in text
    load_config([*base, "--rollout-external-engine-addrs", "h:1"])


def test_without_sglang_router_the_flags_are_those_of_the_router_that_slime_brings(base, tmp_path):
    words = [*base, "--sglang-python", fake_python(tmp_path, router=None)]
    assert load_config(words).router == {}
    config = load_config([*words, "--router-policy", "round_robin"])
    assert (config.router, config.args().router_policy) == ({"policy": "round_robin"}, "round_robin")
    assert "must be one of consistent_hashing, power_of_two, round_robin" in refused(
        [*words, "--router-policy", "random"]
    )
    assert "unknown flag 'router-dp-aware'" in refused([*words, "--router-dp-aware"])


def test_an_embedded_engine_asks_no_program_for_flags_of_its_router(base, tmp_path):
    config = load_config([*base, "--rollout-engine", "embedded", "--router-health-failure-threshold", "1"])
    assert config.router == {"health_failure_threshold": 1}


def test_an_interpreter_that_is_not_there_is_named(base):
    assert "--sglang-python: there is no interpreter 'no-python'" in refused(
        [*base, "--sglang-python", "no-python", "--sglang-log-level", "x"]
    )


def test_a_program_that_cannot_be_imported_says_why(base, tmp_path, python):
    (tmp_path / "packages" / "sglang" / "srt" / "server_args.py").write_text("import no_such_kernels\n")
    assert "No module named 'no_such_kernels'" in refused([*base, "--sglang-python", python])


def test_an_engines_flag_without_the_engine_has_no_effect_and_is_refused(argv):
    words = ["--rollout-engine", "embedded", "--sglang-page-size", "64"]
    assert "--sglang-page-size: has no effect without --rollout-engine sglang" in refused([*argv, *words])


def test_the_program_is_asked_once_for_each_version(argv, tmp_path, python):
    for _ in range(2):
        load_config(argv)
    assert imports(tmp_path) == 1
    other = tmp_path / "other"
    other.mkdir()
    newer = fake_python(other, version="0.6.0")
    assert table_of("sglang", newer).version == "0.6.0"
    assert table_of("sglang", newer) == table_of("sglang", newer)
    assert imports(other) == 1


def test_a_command_line_made_of_values_is_read_back_by_the_programs_parser(argv, python):
    table = table_of("sglang", python)
    values = {
        "mem_fraction_static": 0.5,
        "enable_metrics": True,
        "overlap": False,
        "strict": False,
        "cuda_graph_bs": [1, 2],
        "chat_kwargs": {"a": 1},
        "log_level": None,
    }
    assert table.words(values) == [
        *("--mem-fraction-static=0.5", "--enable-metrics", "--disable-overlap", "--no-strict"),
        *("--cuda-graph-bs", "1", "2", '--chat-kwargs={"a": 1}'),
    ]
    assert table.words({"enable_metrics": False, "overlap": True, "strict": True}) == ["--strict"]


def test_fields_of_a_topology_are_checked_by_the_same_table(python, base):
    table = table_of("sglang", python)
    assert table.check("mem-fraction-static", "0.5", "here") == 0.5
    with pytest.raises(ConfigError, match=r"here: .*0\.5\.23 has no 'page_sise'\n.*'page_size'"):
        table.check("page_sise", 1, "here")
    with pytest.raises(ConfigError, match="here: page_size: must be one of 1, 64"):
        table.check("page_size", 2, "here")


def test_null_in_a_file_is_the_default(base, tmp_path):
    file = tmp_path / "run.yaml"
    deciding = "rollout-engine: null\nsglang-python: ~\nsglang_config:\n"
    file.write_text(deciding)
    config = load_config([*base, "--config", str(file)])
    assert (config.serving.rollout_engine, config.serving.sglang_python) == ("embedded", None)
    python = fake_python(tmp_path)
    file.write_text(deciding + "sglang-page-size: null\n")
    words = [*base, "--config", str(file), "--rollout-engine", "embedded", "--sglang-python", python]
    config = load_config(words)
    assert (config.serving.rollout_engine, config.serving.sglang_python) == ("embedded", python)


@pytest.mark.parametrize("name", ["null", "vllm"])
def test_an_engine_that_is_none_is_refused_with_those_that_are(base, tmp_path, name):
    file = tmp_path / "run.yaml"
    file.write_text(f"rollout-engine: '{name}'\n")
    for words in (["--config", str(file)], ["--rollout-engine", name]):
        text = refused([*base, *words])
        assert f"--rollout-engine: must be one of embedded, sglang; got '{name}'" in text

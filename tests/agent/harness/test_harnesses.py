"""What each harness tells its agent: the session, the window, the limits; and how the agent is called."""

import asyncio
import json
import tomllib

import pytest

from slime.agent.harness import CLAUDE_CODE, CODEX, HARNESSES, MINI_SWE_AGENT, OPENCODE, QWEN_CODE
from slime.agent.harness.claude_code import ClaudeCodeHarness

PROGRAM_OF = {
    CLAUDE_CODE: "claude",
    CODEX: "codex",
    OPENCODE: "opencode",
    QWEN_CODE: "qwen",
    MINI_SWE_AGENT: "mini",
}
URL = "http://127.0.0.1:18001/s/session"


@pytest.fixture
def ran(programs, workdir):
    """Runs the harness with a stand-in program; gives its folder."""

    def run(harness, **options):
        programs.add(PROGRAM_OF[harness])
        started = harness.run(
            programs.sandbox,
            workdir=str(workdir),
            session_id="session",
            adapter_url="http://127.0.0.1:18001",
            time_budget_sec=20,
            prompt="Repair it.",
            context_tokens=40_000,
            max_output_tokens=3000,
            request_timeout_sec=600,
            max_retries=1,
            **options,
        )
        assert asyncio.run(started) == 0
        return workdir / ".harness"

    return run


def everything_told(programs, folder):
    files = [path.read_text() for path in folder.rglob("*") if path.is_file()]
    told = [f"{name}={value}" for name, value in programs.environment.items()]
    return "\n".join([programs.noted("arguments"), *told, *files])


@pytest.mark.parametrize("harness", HARNESSES.values(), ids=HARNESSES)
def test_the_agent_is_told_its_session_its_model_and_its_limits(harness, ran, programs):
    told = everything_told(programs, ran(harness))
    assert URL in told
    assert "slime-actor" in told
    assert "3000" in told or harness is CODEX  # Codex sends no limit of an answer
    assert "40000" in told or harness is MINI_SWE_AGENT  # it does not compact


@pytest.mark.parametrize("harness", HARNESSES.values(), ids=HARNESSES)
def test_the_prompt_is_given_once_and_not_on_the_command_line(harness, ran, programs):
    folder = ran(harness)
    assert "Repair it." not in programs.noted("arguments")
    if harness is MINI_SWE_AGENT:
        assert json.loads((folder / "mini/task.yaml").read_text()) == {"run": {"task": "Repair it."}}
    else:
        assert programs.noted("prompt") == "Repair it."


@pytest.mark.parametrize("harness", HARNESSES.values(), ids=HARNESSES)
def test_nothing_is_written_outside_the_harness_folder(harness, ran, workdir):
    ran(harness)
    assert [path.name for path in workdir.iterdir()] == [".harness"]


def test_claude_code_is_told_the_window_and_kept_from_side_traffic(ran, programs):
    folder = ran(CLAUDE_CODE)
    told = programs.environment
    assert told["ANTHROPIC_BASE_URL"] == URL
    assert told["ANTHROPIC_AUTH_TOKEN"] == "session"
    assert told["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == "40000"
    assert told["CLAUDE_CODE_MAX_RETRIES"] == "1"
    assert told["CLAUDE_CODE_ATTRIBUTION_HEADER"] == "0"
    assert told["CLAUDE_CONFIG_DIR"] == str(folder / "claude")
    switches = ("DISABLE_EXPERIMENTAL_BETAS", "DISABLE_NONESSENTIAL_TRAFFIC")
    assert [told[f"CLAUDE_CODE_{name}"] for name in switches] == ["1", "1"]
    assert told["IS_SANDBOX"] == "1"
    assert {value for name, value in told.items() if name.endswith("_MODEL")} == {"slime-actor"}


def test_claude_codes_settings_say_the_same_as_its_environment(ran, programs, monkeypatch):
    monkeypatch.setenv("SLIME_AGENT_CC_EXTRA_ENVS", '{"CLAUDE_CODE_MAX_RETRIES": "5"}')
    folder = ran(CLAUDE_CODE, environment={"MORE": "y"})
    settings = json.loads((folder / "claude/rollout.json").read_text())
    assert settings["env"].items() <= programs.environment.items()
    assert (settings["env"]["CLAUDE_CODE_MAX_RETRIES"], settings["env"]["MORE"]) == ("5", "y")
    assert f"--settings\n{folder}/claude/rollout.json" in programs.noted("arguments")


def test_codex_is_configured_for_the_responses_protocol(ran, programs):
    config = tomllib.loads((ran(CODEX) / "codex/config.toml").read_text())
    provider = config["model_providers"][config["model_provider"]]
    assert provider["wire_api"] == "responses"
    assert provider["base_url"] == f"{URL}/v1"
    assert programs.environment[provider["env_key"]] == "session"
    assert provider["stream_idle_timeout_ms"] == 600_000
    assert config["model_context_window"] == 40_000
    assert config["model_auto_compact_token_limit"] < 40_000 - 3000


def test_opencode_knows_one_provider_and_asks_for_no_title(ran, programs):
    ran(OPENCODE)
    config = json.loads(programs.environment["OPENCODE_CONFIG_CONTENT"])
    (provider,) = config["provider"].values()
    assert provider["options"]["baseURL"] == f"{URL}/v1"
    assert provider["options"]["apiKey"] == "session"
    assert provider["models"]["slime-actor"]["limit"] == {"context": 40_000, "output": 3000}
    assert "--title" in programs.noted("arguments")


def test_qwen_code_does_not_multiply_its_retries(ran, programs):
    file = ran(QWEN_CODE) / "qwen/rollout.json"
    assert programs.environment["QWEN_CODE_SYSTEM_SETTINGS_PATH"] == str(file)
    (model,) = json.loads(file.read_text())["modelProviders"]["openai"]
    generation = model["generationConfig"]
    assert model["baseUrl"] == f"{URL}/v1"
    assert generation["contextWindowSize"] == 40_000
    assert generation["timeout"] == 600_000
    assert generation["maxRetries"] == 0
    assert programs.environment["OPENAI_BASE_URL"] == f"{URL}/v1"


def test_mini_swe_agent_is_told_the_turn_cap(ran):
    config = json.loads((ran(MINI_SWE_AGENT, max_turns=9) / "mini/config.yaml").read_text())
    assert config["agent"]["step_limit"] == 9
    assert config["model"]["model_kwargs"]["api_base"] == f"{URL}/v1"


def test_a_subclass_changes_one_thing(ran):
    class Older(ClaudeCodeHarness):
        version = "2.1.197"

    assert (Older().name, Older().version) == (CLAUDE_CODE.name, "2.1.197")

"""Every real client starts headless with its harness's settings, speaks to its session and ends by itself."""

import json

import pytest

from tests.clients.clients import CLI_CLIENTS, SDK_CLIENTS

pytestmark = pytest.mark.slow
ELSEWHERE = "http://127.0.0.1:9/v1"
OWN_SETTINGS = {
    "claude_code": {
        ".claude/settings.json": {
            "env": {
                "ANTHROPIC_BASE_URL": ELSEWHERE,
                "ANTHROPIC_MODEL": "other",
                "CLAUDE_CODE_MAX_CONTEXT_TOKENS": "999",
            }
        }
    },
    "codex": {
        ".codex/config.toml": f"""model = "other"
model_provider = "slime"
[model_providers.slime]
base_url = "{ELSEWHERE}"
"""
    },
    "opencode": {
        "opencode.json": {
            "provider": {"slime": {"options": {"baseURL": ELSEWHERE}}},
            "model": "slime/other",
        }
    },
    "qwen_code": {
        ".env": f"OPENAI_BASE_URL={ELSEWHERE}",
        ".qwen/settings.json": {
            "env": {"OPENAI_BASE_URL": ELSEWHERE},
            "model": {"name": "other"},
            "modelProviders": {"openai": [{"id": "slime-actor", "baseUrl": ELSEWHERE, "envKey": "X"}]},
        },
    },
    "mini_swe_agent": {".env": f"OPENAI_API_BASE={ELSEWHERE}"},
}
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"


def ending(name):
    """mini-swe-agent ends by a command, not by a text."""
    return [SUBMIT] if name == "mini_swe_agent" else []


@pytest.mark.parametrize("name", CLI_CLIENTS + SDK_CLIENTS)
def test_a_text_turn_ends_the_client(name, play, require_client):
    require_client(name)
    run, server = play(name, ending(name))
    assert run.rc == 0, run
    assert len(server.requests) == 1
    assert all(request["path"].startswith("/s/session/1/") for request in server.requests)


@pytest.mark.parametrize("name", CLI_CLIENTS + SDK_CLIENTS)
def test_a_tool_turn_is_carried_out_and_answered(name, play, require_client, tmp_path):
    require_client(name)
    prompt = "-- Make 'it'.\n" + "é" * 5000
    run, server = play(name, ["echo hi > made.txt", *ending(name)], prompt=prompt)
    assert run.rc == 0, run
    assert (tmp_path / "made.txt").read_text() == "hi\n"
    assert len(server.requests) == 2
    assert "é" * 5000 in str(server.requests[0]["body"])
    assert server.requests[0]["body"]["model"] == "slime-actor"


@pytest.mark.parametrize("name", CLI_CLIENTS)
def test_no_client_asks_for_anything_besides_its_turns(name, play, require_client):
    require_client(name)
    _, server = play(name, ending(name))
    assert server.other == []
    assert all(request["body"].get("tools") for request in server.requests)


@pytest.mark.parametrize("name", CLI_CLIENTS)
def test_a_repositorys_own_settings_cannot_lead_the_agent_elsewhere(name, play, require_client, tmp_path):
    require_client(name)
    for path, text in OWN_SETTINGS[name].items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text if isinstance(text, str) else json.dumps(text))
    run, server = play(name, ending(name))
    assert run.rc == 0, run
    (request,) = server.requests
    assert request["body"]["model"] == "slime-actor"
    assert request["headers"]["Authorization"] == "Bearer session/1"


def test_a_repositorys_instructions_are_read(play, require_client, tmp_path):
    require_client("opencode")
    (tmp_path / "AGENTS.md").write_text("Be a pangolin.")
    _, server = play("opencode", [])
    assert "Be a pangolin." in str(server.requests[0]["body"])


@pytest.mark.parametrize("name", CLI_CLIENTS)
def test_the_agents_log_is_kept(name, play, require_client, tmp_path):
    require_client(name)
    run, _ = play(name, ["echo hi > made.txt", *ending(name)])
    assert "made.txt" in run.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == [".harness", "made.txt"]


@pytest.mark.parametrize("name", CLI_CLIENTS)
def test_a_client_whose_requests_are_refused_gives_up(name, play, require_client):
    require_client(name)
    run, server = play(name, [], refuse_with=429, timeout=180)
    assert run.rc not in (0, -1)
    assert len(server.requests) <= 7


@pytest.mark.parametrize("name", CLI_CLIENTS)
def test_a_closing_text_ends_a_run_that_goes_on(name, play, require_client):
    require_client(name)
    run, server = play(name, ["true"] * 3)
    assert run.rc == 0, run
    assert len(server.requests) <= 6

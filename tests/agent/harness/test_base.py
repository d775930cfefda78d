"""A run of any harness: the prompt arrives, the log stays, what goes wrong is said."""

import asyncio
import subprocess
import time

import pytest

from slime.agent.harness import (
    BaseHarness,
    HarnessContext,
    HarnessError,
    UserSettings,
    agent_log,
    run_agent,
    user_settings,
)
from slime.errors import ConfigError


class Stub(BaseHarness):
    name = "stub"
    variables = "STUB"

    async def install_cli(self, sb):
        return None

    async def write_config(self, sb, ctx):
        await sb.write_file(ctx.meta("stub/config"), ctx.base_url)

    async def launch_and_wait(self, sb, ctx, prompt, budget):
        settings = user_settings(self.variables)
        env = {"URL": ctx.base_url, "TOKENS": str(ctx.context_tokens)}
        return await run_agent(
            sb, ctx, ["stub", "two words"], prompt=prompt, budget=budget, env=env, settings=settings
        )


def run(programs, workdir, *, prompt="Repair it.", budget=20, **options):
    started = Stub().run(
        programs.sandbox,
        workdir=str(workdir),
        session_id="a/b c",
        adapter_url="http://127.0.0.1:18001/",
        time_budget_sec=budget,
        prompt=prompt,
        **options,
    )
    return asyncio.run(started)


@pytest.mark.parametrize("prompt", ['-- it\'s "this" $HOME `x`\n\nñ', "x" * 300_000, ""])
def test_the_prompt_arrives_as_it_is(programs, workdir, prompt):
    programs.add("stub")
    assert run(programs, workdir, prompt=prompt) == 0
    assert programs.noted("prompt") == prompt
    assert programs.noted("arguments") == "two words\n"
    assert programs.noted("cwd").strip() == str(workdir)


def test_the_exit_code_is_the_agents(programs, workdir):
    programs.add("stub")
    assert run(programs, workdir, environment={"PROGRAM_DOES": "exit 7"}) == 7


def test_a_budget_that_runs_out_kills_the_agent_and_all_its_children(programs, workdir):
    programs.add("stub")
    does = "setsid sleep 1000 & echo $! > child; wait"
    for budget in (1, 10):  # a slow machine may need more to begin
        assert run(programs, workdir, budget=budget, environment={"PROGRAM_DOES": does}) == -1
        if (workdir / "child").exists():
            break
    show = ["ps", "-o", "stat=", "-p", (workdir / "child").read_text().strip()]
    end = time.monotonic() + 20
    while subprocess.run(show, capture_output=True, text=True).stdout[:1] not in ("", "Z"):
        assert time.monotonic() < end, "the child lives on"
        time.sleep(0.05)


def test_the_log_is_kept_and_git_does_not_see_it(programs, workdir, log_of):
    programs.add("stub")
    subprocess.run(["git", "init", "-q", workdir], check=True)
    assert run(programs, workdir) == 0
    assert log_of() == [{"type": "started"}]
    assert (workdir / ".harness" / "stderr.log").read_text() == "a complaint\n"
    assert asyncio.run(agent_log(programs.sandbox, str(workdir))) == '{"type": "started"}\n'
    status = subprocess.run(["git", "-C", workdir, "status", "--short"], capture_output=True, text=True)
    assert status.stdout == ""


def test_a_program_that_is_not_there_is_an_error_that_names_the_remedy(programs, workdir):
    with pytest.raises(HarnessError, match=r"(?s)stub cannot be run: .*not found.*install_cli"):
        run(programs, workdir)


def test_the_session_is_part_of_the_address(programs, workdir):
    programs.add("stub")
    run(programs, workdir)
    assert (workdir / ".harness" / "stub" / "config").read_text() == "http://127.0.0.1:18001/s/a%2Fb%20c"
    ctx = HarnessContext("/w", "id", "http://h")
    assert (ctx.base_url, ctx.openai_url) == ("http://h/s/id", "http://h/s/id/v1")


def test_options_reach_the_context(programs, workdir):
    programs.add("stub")
    run(programs, workdir, context_tokens=4096)
    assert programs.environment["TOKENS"] == "4096"


def test_the_users_arguments_and_variables_are_added(programs, workdir, monkeypatch):
    monkeypatch.setenv("SLIME_AGENT_STUB_EXTRA_ARGS", "--flag 'a b'")
    monkeypatch.setenv("SLIME_AGENT_STUB_EXTRA_ENVS", '{"TOKENS": "7", "MORE": "x"}')
    programs.add("stub")
    run(programs, workdir, environment={"MORE": "y"})
    assert programs.noted("arguments") == "two words\n--flag\na b\n"
    assert (programs.environment["TOKENS"], programs.environment["MORE"]) == ("7", "y")


@pytest.mark.parametrize("text", ["{", "[]", '{"A": 1}'])
def test_variables_that_are_no_json_object_of_strings_are_refused(monkeypatch, text):
    monkeypatch.setenv("SLIME_AGENT_STUB_EXTRA_ENVS", text)
    with pytest.raises(ConfigError, match="SLIME_AGENT_STUB_EXTRA_ENVS"):
        user_settings("STUB")


def test_nothing_set_is_nothing_changed(monkeypatch):
    for name in ("TARBALL", "VERSION", "EXTRA_ARGS", "EXTRA_ENVS"):
        monkeypatch.delenv(f"SLIME_AGENT_CC_{name}", raising=False)
    assert user_settings("CC") == UserSettings()

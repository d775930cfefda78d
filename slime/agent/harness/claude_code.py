"""Claude Code: the Anthropic Messages protocol, configured by environment variables.

Invariant: they are given by the process's environment and once more by ``--settings``, because a repository's
own ``.claude/settings.json`` overrides the environment but not that file. Measured with 2.1.332. Knows
nothing of the adapter.
"""

from __future__ import annotations

import json

from slime.agent.harness.base import AGENT_USER, BaseHarness, HarnessContext, run_agent, user_settings
from slime.agent.harness.install import install_npm_cli
from slime.agent.sandbox import Sandbox

MILLISECONDS = 1000
COMMAND = (
    *("claude", "-p", "--permission-mode", "bypassPermissions", "--output-format", "stream-json"),
    *("--include-partial-messages", "--include-hook-events", "--verbose"),
)
ONE_MODEL_VARIABLES = (
    "ANTHROPIC_MODEL",
    "ANTHROPIC_SMALL_FAST_MODEL",
    "ANTHROPIC_DEFAULT_HAIKU_MODEL",
    "ANTHROPIC_DEFAULT_SONNET_MODEL",
    "ANTHROPIC_DEFAULT_OPUS_MODEL",
    "CLAUDE_CODE_SUBAGENT_MODEL",
)


class ClaudeCodeHarness(BaseHarness):
    """`claude -p`, prompt on standard input."""

    name = "claude_code"
    variables = "CC"
    package = "@anthropic-ai/claude-code"
    version = "2.1.332"

    async def install_cli(self, sb: Sandbox) -> None:
        settings = user_settings(self.variables)
        version = settings.version or self.version
        await install_npm_cli(sb, self.package, "claude", version=version, tarball=settings.tarball)

    async def write_config(self, sb: Sandbox, ctx: HarnessContext) -> None:
        settings = {"env": _environment(self.variables, ctx), "includeCoAuthoredBy": False}
        await sb.write_file(ctx.meta("claude/rollout.json"), json.dumps(settings), user=AGENT_USER)

    async def launch_and_wait(self, sb: Sandbox, ctx: HarnessContext, prompt: str, budget: float) -> int:
        settings = user_settings(self.variables)
        env = claude_environment(ctx)
        command = (*COMMAND, "--settings", ctx.meta("claude/rollout.json"))
        return await run_agent(sb, ctx, command, prompt=prompt, budget=budget, env=env, settings=settings)


def _environment(variables: str, ctx: HarnessContext) -> dict[str, str]:
    """All variables of the run; a user's own win."""
    return {**claude_environment(ctx), **user_settings(variables).extra_envs, **ctx.environment}


def claude_environment(ctx: HarnessContext) -> dict[str, str]:
    """The variables that make Claude Code speak to the session, and to nothing else.

    Without `CLAUDE_CODE_MAX_CONTEXT_TOKENS` it takes an unknown model to have a million tokens and never
    compacts; without `IS_SANDBOX` it refuses to run as root; with experimental betas its tools change in
    mid-session, and the attribution header changes the system prompt.
    """
    return {
        "ANTHROPIC_BASE_URL": ctx.base_url,
        "ANTHROPIC_AUTH_TOKEN": ctx.session_id,
        **dict.fromkeys(ONE_MODEL_VARIABLES, ctx.model_label),
        "API_TIMEOUT_MS": str(ctx.request_timeout_sec * MILLISECONDS),
        "CLAUDE_CODE_MAX_RETRIES": str(ctx.max_retries),
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(ctx.context_tokens),
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(ctx.max_output_tokens),
        "CLAUDE_CODE_DISABLE_EXPERIMENTAL_BETAS": "1",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
        "CLAUDE_CONFIG_DIR": ctx.meta("claude"),
        "DISABLE_AUTOUPDATER": "1",
        "IS_SANDBOX": "1",
    }


CLAUDE_CODE = ClaudeCodeHarness()

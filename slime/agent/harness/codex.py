"""Codex: the OpenAI Responses protocol, configured by ``config.toml``.

Measured with 0.171.0, which knows no other wire protocol. Knows nothing of the adapter.
"""

from __future__ import annotations

import json

from slime.agent.harness.base import AGENT_USER, BaseHarness, HarnessContext, run_agent, user_settings
from slime.agent.harness.install import install_npm_cli
from slime.agent.sandbox import Sandbox

MILLISECONDS = 1000
COMPACT_AT = 0.85
COMMAND = (
    *("codex", "exec", "--skip-git-repo-check", "--json"),
    *("--dangerously-bypass-approvals-and-sandbox", "-"),
)


class CodexHarness(BaseHarness):
    """`codex exec`, prompt on standard input."""

    name = "codex"
    variables = "CODEX"
    package = "@openai/codex"
    version = "0.171.0"

    async def install_cli(self, sb: Sandbox) -> None:
        settings = user_settings(self.variables)
        version = settings.version or self.version
        await install_npm_cli(sb, self.package, "codex", version=version, tarball=settings.tarball)

    async def write_config(self, sb: Sandbox, ctx: HarnessContext) -> None:
        await sb.write_file(ctx.meta("codex/config.toml"), codex_config(ctx), user=AGENT_USER)

    async def launch_and_wait(self, sb: Sandbox, ctx: HarnessContext, prompt: str, budget: float) -> int:
        env = {"CODEX_HOME": ctx.meta("codex"), "SLIME_SESSION": ctx.session_id}
        settings = user_settings(self.variables)
        return await run_agent(sb, ctx, COMMAND, prompt=prompt, budget=budget, env=env, settings=settings)


def codex_config(ctx: HarnessContext) -> str:
    """The text of ``config.toml``.

    The window is told, because an unknown model has none; web search is a tool that only the vendor's server
    can run. Codex waits for events, not for bytes: `stream_idle_timeout_ms` bounds the wait between two. With
    unbounded connection retries it would wait without end for an adapter that is gone.
    """
    provider: dict[str, object] = {
        "name": "slime",
        "base_url": ctx.openai_url,
        "wire_api": "responses",
        "env_key": "SLIME_SESSION",
        "request_max_retries": ctx.max_retries,
        "stream_max_retries": ctx.max_retries,
        "stream_idle_timeout_ms": ctx.request_timeout_sec * MILLISECONDS,
    }
    top: dict[str, object] = {
        "model": ctx.model_label,
        "model_provider": "slime",
        "model_context_window": ctx.context_tokens,
        "model_auto_compact_token_limit": int(COMPACT_AT * (ctx.context_tokens - ctx.max_output_tokens)),
        "approval_policy": "never",
        "sandbox_mode": "danger-full-access",
        "check_for_update_on_startup": False,
        "web_search": "disabled",
    }
    tables: dict[str, dict[str, object]] = {
        "model_providers.slime": provider,
        "features": {"unbounded_connection_retries": False},
        "analytics": {"enabled": False},
    }
    return _lines(top) + "".join(f"\n[{name}]\n{_lines(table)}" for name, table in tables.items())


def _lines(table: dict[str, object]) -> str:
    """Strings, integers and booleans are written alike in TOML and JSON."""
    return "".join(f"{name} = {json.dumps(value)}\n" for name, value in table.items())


CODEX = CodexHarness()

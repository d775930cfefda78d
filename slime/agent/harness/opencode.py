"""opencode: the OpenAI Chat Completions protocol, configured by what else stands in ``opencode.json``.

Invariant: the configuration goes in the variable that is read last, so that a repository's own
``opencode.json`` cannot lead the agent to another model. Measured with 1.18.33. Knows nothing of the adapter.
"""

from __future__ import annotations

import json
from typing import Any

from slime.agent.harness.base import BaseHarness, HarnessContext, run_agent, user_settings
from slime.agent.harness.install import install_npm_cli
from slime.agent.sandbox import Sandbox

MILLISECONDS = 1000
PROVIDER = "slime"
XDG_FOLDERS = ("XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME", "XDG_CACHE_HOME")


class OpencodeHarness(BaseHarness):
    """`opencode run`, prompt on standard input.

    Attributes:
        title: options that name the session, which else asks the model for a title.
    """

    title: tuple[str, ...] = ("--title", "rollout")
    name = "opencode"
    variables = "OPENCODE"
    package = "opencode-ai"
    version = "1.18.33"

    async def install_cli(self, sb: Sandbox) -> None:
        settings = user_settings(self.variables)
        version = settings.version or self.version
        await install_npm_cli(sb, self.package, "opencode", version=version, tarball=settings.tarball)

    async def write_config(self, sb: Sandbox, ctx: HarnessContext) -> None:
        return None

    async def launch_and_wait(self, sb: Sandbox, ctx: HarnessContext, prompt: str, budget: float) -> int:
        model = f"{PROVIDER}/{ctx.model_label}"
        command = ("opencode", "run", "--format", "json", "--auto", *self.title, "-m", model)
        env = {
            "OPENCODE_CONFIG_CONTENT": json.dumps(opencode_config(ctx)),
            "OPENCODE_DISABLE_AUTOUPDATE": "1",
            "OPENCODE_DISABLE_MODELS_FETCH": "1",
            **{name: ctx.meta(f"opencode/{name.lower()}") for name in XDG_FOLDERS},
        }
        settings = user_settings(self.variables)
        return await run_agent(sb, ctx, command, prompt=prompt, budget=budget, env=env, settings=settings)


def opencode_config(ctx: HarnessContext) -> dict[str, Any]:
    """The configuration; compaction follows `limit.context`."""
    wait = ctx.request_timeout_sec * MILLISECONDS
    model = {
        "name": ctx.model_label,
        "tool_call": True,
        "reasoning": True,
        "limit": {"context": ctx.context_tokens, "output": ctx.max_output_tokens},
    }
    options = {
        "baseURL": ctx.openai_url,
        "apiKey": ctx.session_id,
        "timeout": wait,
        "headerTimeout": wait,
        "chunkTimeout": wait,
    }
    return {
        "$schema": "https://opencode.ai/config.json",
        "provider": {
            PROVIDER: {
                "npm": "@ai-sdk/openai-compatible",
                "name": PROVIDER,
                "options": options,
                "models": {ctx.model_label: model},
            }
        },
        "model": f"{PROVIDER}/{ctx.model_label}",
        "small_model": f"{PROVIDER}/{ctx.model_label}",
        "enabled_providers": [PROVIDER],
        "permission": {"*": "allow"},
        "share": "disabled",
        "autoupdate": False,
    }


OPENCODE = OpencodeHarness()

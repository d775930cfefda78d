"""qwen-code: the OpenAI Chat Completions protocol, configured by a settings file.

Invariant: the file is what the agent takes for the system's settings, which a repository's own cannot
override. Measured with 0.24.4, which needs Node 22. Knows nothing of the adapter.
"""

from __future__ import annotations

import json
from typing import Any

from slime.agent.harness.base import AGENT_USER, BaseHarness, HarnessContext, run_agent, user_settings
from slime.agent.harness.install import install_npm_cli
from slime.agent.sandbox import Sandbox

MILLISECONDS = 1000
RETRY_DELAY_MS = 1000
COMMAND = ("qwen", "-o", "stream-json", "--auth-type", "openai", "--yolo")


class QwenCodeHarness(BaseHarness):
    """`qwen`, prompt on standard input."""

    name = "qwen_code"
    variables = "QWEN"
    package = "@qwen-code/qwen-code"
    version = "0.24.4"

    async def install_cli(self, sb: Sandbox) -> None:
        settings = user_settings(self.variables)
        version = settings.version or self.version
        await install_npm_cli(
            sb, self.package, "qwen", version=version, tarball=settings.tarball, node_major=22
        )

    async def write_config(self, sb: Sandbox, ctx: HarnessContext) -> None:
        text = json.dumps(qwen_settings(ctx), indent=2)
        await sb.write_file(ctx.meta("qwen/rollout.json"), text, user=AGENT_USER)

    async def launch_and_wait(self, sb: Sandbox, ctx: HarnessContext, prompt: str, budget: float) -> int:
        env = {
            "QWEN_HOME": ctx.meta("qwen"),
            "QWEN_CODE_SYSTEM_SETTINGS_PATH": ctx.meta("qwen/rollout.json"),
            "OPENAI_API_KEY": ctx.session_id,
            "OPENAI_BASE_URL": ctx.openai_url,
            "OPENAI_MODEL": ctx.model_label,
            "QWEN_CODE_MAX_OUTPUT_TOKENS": str(ctx.max_output_tokens),
        }
        settings = user_settings(self.variables)
        return await run_agent(sb, ctx, COMMAND, prompt=prompt, budget=budget, env=env, settings=settings)


def qwen_settings(ctx: HarnessContext) -> dict[str, Any]:
    """The content of the settings file.

    By default a rate limit is waited out without end, and a request is sent anew after two minutes without a
    byte; memory agents would ask the model behind the task's back. `maxRetries` multiplies the seven attempts
    that cannot be turned down, so that it is 0 whatever `HarnessContext.max_retries` says.
    """
    wait = ctx.request_timeout_sec * MILLISECONDS
    generation = {
        "contextWindowSize": ctx.context_tokens,
        "timeout": wait,
        "streamIdleTimeoutMs": wait,
        "maxRetries": 0,
        "retryInitialDelayMs": RETRY_DELAY_MS,
        "retryMaxDelayMs": RETRY_DELAY_MS,
    }
    model = {"id": ctx.model_label, "baseUrl": ctx.openai_url, "envKey": "OPENAI_API_KEY"}
    return {
        "security": {"auth": {"selectedType": "openai"}},
        "modelProviders": {"openai": [{**model, "generationConfig": generation}]},
        "model": {"name": ctx.model_label},
        "memory": {"enableManagedAutoMemory": False, "enableManagedAutoDream": False},
        "general": {"enableAutoUpdate": False},
        "privacy": {"usageStatisticsEnabled": False},
        "telemetry": {"enabled": False},
    }


QWEN_CODE = QwenCodeHarness()

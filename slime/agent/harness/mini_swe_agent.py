"""mini-swe-agent: the OpenAI Chat Completions protocol through litellm, configured by one file.

Measured with 2.4.6. It answers a turn without a tool call with a complaint and asks again, so that a closing
text turn ends it at the third; `HarnessContext.max_turns` ends it at once. Knows nothing of the adapter.
"""

from __future__ import annotations

import json
from typing import Any

from slime.agent.harness.base import AGENT_USER, BaseHarness, HarnessContext, run_agent, user_settings
from slime.agent.harness.install import install_python_cli
from slime.agent.sandbox import Sandbox


class MiniSweAgentHarness(BaseHarness):
    """`mini`, prompt in its configuration; its own trajectory is kept as ``mini/trajectory.json``."""

    name = "mini_swe_agent"
    variables = "MINI"
    package = "mini-swe-agent"
    version = "2.4.6"

    async def install_cli(self, sb: Sandbox) -> None:
        settings = user_settings(self.variables)
        version = settings.version or self.version
        await install_python_cli(
            sb, self.package, "mini", version=version, tarball=settings.tarball, version_flag="--help"
        )

    async def write_config(self, sb: Sandbox, ctx: HarnessContext) -> None:
        text = json.dumps(mini_config(ctx), indent=2)
        await sb.write_file(ctx.meta("mini/config.yaml"), text, user=AGENT_USER)

    async def launch_and_wait(self, sb: Sandbox, ctx: HarnessContext, prompt: str, budget: float) -> int:
        task = json.dumps({"run": {"task": prompt}})
        await sb.write_file(ctx.meta("mini/task.yaml"), task, user=AGENT_USER)
        configs = ("mini.yaml", ctx.meta("mini/config.yaml"), ctx.meta("mini/task.yaml"))
        options = [word for config in configs for word in ("-c", config)]
        output = ("-o", ctx.meta("mini/trajectory.json"))
        env = {
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "MSWEA_CONFIGURED": "true",
            "MSWEA_GLOBAL_CONFIG_DIR": ctx.meta("mini"),
            "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": str(ctx.max_retries + 1),
        }
        command = ("mini", "--yolo", "--exit-immediately", *options, *output)
        settings = user_settings(self.variables)
        return await run_agent(sb, ctx, command, prompt=prompt, budget=budget, env=env, settings=settings)


def mini_config(ctx: HarnessContext) -> dict[str, Any]:
    """The configuration, laid over the agent's own ``mini.yaml``; JSON is YAML."""
    call = {
        "api_base": ctx.openai_url,
        "api_key": ctx.session_id,
        "max_tokens": ctx.max_output_tokens,
        "timeout": ctx.request_timeout_sec,
        "num_retries": 0,
        "drop_params": True,
    }
    return {
        "agent": {"step_limit": ctx.max_turns or 0, "cost_limit": 0},
        "model": {
            "model_class": "litellm",
            "model_name": f"openai/{ctx.model_label}",
            "cost_tracking": "ignore_errors",
            "model_kwargs": call,
        },
    }


MINI_SWE_AGENT = MiniSweAgentHarness()

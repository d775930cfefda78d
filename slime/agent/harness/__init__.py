"""Harnesses: one file an agent, each with the settings that its unmodified program needs.

`<HARNESS>.run(sandbox, ...)` runs the agent against a session of an adapter. Knows no protocol and no tokens.
"""

from slime.agent.harness.base import (
    AGENT_USER,
    BaseHarness,
    ContextOptions,
    HarnessContext,
    HarnessError,
    UserSettings,
    agent_log,
    run_agent,
    user_settings,
)
from slime.agent.harness.claude_code import CLAUDE_CODE, ClaudeCodeHarness
from slime.agent.harness.codex import CODEX, CodexHarness
from slime.agent.harness.install import install_node, install_npm_cli, install_python_cli
from slime.agent.harness.mini_swe_agent import MINI_SWE_AGENT, MiniSweAgentHarness
from slime.agent.harness.opencode import OPENCODE, OpencodeHarness
from slime.agent.harness.qwen_code import QWEN_CODE, QwenCodeHarness

HARNESSES: dict[str, BaseHarness] = {
    harness.name: harness for harness in (CLAUDE_CODE, CODEX, OPENCODE, QWEN_CODE, MINI_SWE_AGENT)
}

__all__ = [
    "CLAUDE_CODE",
    "CODEX",
    "HARNESSES",
    "MINI_SWE_AGENT",
    "OPENCODE",
    "QWEN_CODE",
    "BaseHarness",
    "ClaudeCodeHarness",
    "CodexHarness",
    "ContextOptions",
    "HarnessContext",
    "HarnessError",
    "MiniSweAgentHarness",
    "OpencodeHarness",
    "QwenCodeHarness",
    "UserSettings",
    "AGENT_USER",
    "agent_log",
    "install_node",
    "install_npm_cli",
    "install_python_cli",
    "run_agent",
    "user_settings",
]

"""The example's settings, from environment variables, checked before a sandbox starts.

Invariant: a value that is here is usable, or `ConfigError` named its variable. Knows nothing of sandboxes and
adapters.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime.agent.harness import HARNESSES
from slime.errors import ConfigError

SANDBOXES = ("local", "docker", "e2b")
PROTOCOLS = ("scaleswe",)
PROMPT = (
    "The repository in the current directory has a bug; PROBLEM_STATEMENT.md describes it. Repair the code "
    "so that the problem is gone and everything else stays as it is. The tests decide; do not change them."
)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the environment says; the table in README.md tells which variable is which."""

    agent: str
    sandbox: str
    agent_prefix: str | None
    train_protocol: str
    eval_protocol: str
    public_host: str | None
    bind_host: str
    port: int
    agent_seconds: float
    eval_seconds: float
    guard_seconds: float
    boot_concurrency: int
    boot_retries: int
    fork_threshold: int | None
    max_turns: int
    prompt: str
    log_dir: str | None

    @classmethod
    def from_environment(cls) -> Settings:
        """Read and check.

        Raises:
            ConfigError: a variable that cannot be used, or one that is missing.
        """
        agent_seconds = _number("SWE_AGENT_TIME_BUDGET_SEC", 1800)
        eval_seconds = _number("SWE_EVAL_TIMEOUT_SEC", 600)
        sandbox = _choice("SWE_SANDBOX", "local", SANDBOXES)
        threshold = _number("SLIME_FORK_MERGE_MAX_RESPONSE_TOKENS", -1)
        return cls(
            agent=_choice("SWE_AGENT", "claude_code", tuple(HARNESSES)),
            sandbox=sandbox,
            agent_prefix=_prefix("SWE_AGENT_PREFIX", sandbox),
            train_protocol=_choice("SWE_TRAIN_PROTOCOL", "scaleswe", PROTOCOLS),
            eval_protocol=_choice("SWE_EVAL_PROTOCOL", "scaleswe", PROTOCOLS),
            public_host=_public_host("ADAPTER_PUBLIC_HOST", sandbox),
            bind_host=os.environ.get("ADAPTER_BIND_HOST") or "0.0.0.0",
            port=int(_number("ADAPTER_PORT", 18001)),
            agent_seconds=agent_seconds,
            eval_seconds=eval_seconds,
            guard_seconds=_number("SWE_ROLLOUT_GUARD_SEC", agent_seconds + eval_seconds + 180),
            boot_concurrency=int(_number("SWE_BOOT_CONCURRENCY", 16)),
            boot_retries=int(_number("SWE_BOOT_RETRIES", 2)),
            fork_threshold=int(threshold) if threshold >= 0 else None,
            max_turns=int(_number("SWE_MAX_TURNS", 100)),
            prompt=os.environ.get("SWE_CC_PROMPT") or PROMPT,
            log_dir=os.environ.get("SWE_LOG_DIR") or None,
        )

    def check(self, args: Any) -> None:
        """That the run lets a rollout live as long as the guard.

        Raises:
            ConfigError: ``--rollout-timeout`` would come first, and all rollouts that take long would fail.
        """
        deadline = float(getattr(args, "rollout_timeout", None) or self.guard_seconds + 1)
        if deadline <= self.guard_seconds:
            raise ConfigError(
                f"{deadline:g} s are over before the guard of a rollout ({self.guard_seconds:g} s)",
                place="--rollout-timeout",
                remedy="raise it, or lower SWE_AGENT_TIME_BUDGET_SEC or SWE_ROLLOUT_GUARD_SEC",
            )


def _number(name: str, default: float) -> float:
    text = os.environ.get(name)
    try:
        return float(text) if text else default
    except ValueError as error:
        raise ConfigError(f"is no number: {text!r}", place=name) from error


def _choice(name: str, default: str, choices: tuple[str, ...]) -> str:
    value = os.environ.get(name) or default
    if value not in choices:
        raise ConfigError(f"is {value!r}", place=name, remedy=f"use one of {', '.join(choices)}")
    return value


def _prefix(name: str, sandbox: str) -> str | None:
    value = os.environ.get(name)
    if not value:
        return None
    if sandbox != "local":
        remedy = "leave it out: the agent is in the image, or is installed from the registry or a tarball"
        raise ConfigError(f"has no effect with SWE_SANDBOX={sandbox}", place=name, remedy=remedy)
    if not Path(value, "bin").is_dir():
        raise ConfigError(f"{value} has no folder bin", place=name, remedy="name what npm installed into")
    return str(Path(value).resolve())


def _public_host(name: str, sandbox: str) -> str | None:
    host = os.environ.get(name) or None
    if host is None and sandbox != "local":
        remedy = "name this machine as the sandboxes reach it"
        raise ConfigError(f"is required with SWE_SANDBOX={sandbox}", place=name, remedy=remedy)
    return host

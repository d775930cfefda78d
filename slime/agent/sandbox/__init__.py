"""Sandboxes: where an agent's commands run. One protocol; local (no daemon), docker and E2B backends."""

from slime.agent.sandbox.base import (
    EXIT_TIME_BUDGET_EXCEEDED,
    ExecResult,
    Limits,
    Sandbox,
    SandboxClosedError,
    SandboxCommandError,
    SandboxError,
    SandboxFileError,
    SandboxFileNotFoundError,
    SandboxUnavailableError,
)
from slime.agent.sandbox.docker import DockerSandbox
from slime.agent.sandbox.e2b import E2BSandbox
from slime.agent.sandbox.leases import reap_leases
from slime.agent.sandbox.local import LocalSandbox
from slime.agent.sandbox.pool import SandboxPool
from slime.agent.sandbox.run import ensure_agent_user, exec_and_wait

__all__ = [
    "EXIT_TIME_BUDGET_EXCEEDED",
    "DockerSandbox",
    "E2BSandbox",
    "ExecResult",
    "Limits",
    "LocalSandbox",
    "Sandbox",
    "SandboxClosedError",
    "SandboxCommandError",
    "SandboxError",
    "SandboxFileError",
    "SandboxFileNotFoundError",
    "SandboxPool",
    "SandboxUnavailableError",
    "ensure_agent_user",
    "exec_and_wait",
    "reap_leases",
]

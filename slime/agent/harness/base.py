"""What a harness is: the settings with which an agent runs in a sandbox against one session of an adapter.

A harness is stateless; a run is `HarnessContext` plus prompt. Invariant: everything that a run writes besides
the agent's own edits lies in ``{workdir}/.harness``, which git ignores: configuration, prompt, the agent's
log (``trajectory.jsonl``) and its complaints (``stderr.log``). Knows no protocol, no tokens, no rewards.
"""

from __future__ import annotations

import abc
import json
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypedDict, Unpack
from urllib.parse import quote

from slime.agent.sandbox import Sandbox, ensure_agent_user, exec_and_wait
from slime.errors import ConfigError, SlimeError

AGENT_USER = "agent"
INSTALL_PREFIX = "/usr/local"
CANNOT_RUN, NOT_FOUND = 126, 127
TAIL_CHARACTERS = 2000


class HarnessError(SlimeError):
    """An agent could not be installed, configured or started. Never a reward."""


class ContextOptions(TypedDict, total=False):
    """The fields of `HarnessContext` that have defaults."""

    model_label: str
    context_tokens: int
    max_output_tokens: int
    max_turns: int | None
    request_timeout_sec: int
    max_retries: int
    environment: Mapping[str, str]


@dataclass(frozen=True)
class HarnessContext:
    """What one run of an agent needs to know.

    Attributes:
        workdir: where the agent works, inside the sandbox.
        session_id: names the adapter's session; it travels in the base URL and as the credential.
        adapter_url: the adapter as the sandbox reaches it, without the session: ``http://127.0.0.1:18001``.
        model_label: a model name that no client knows, so that none turns on features of its own for it.
        context_tokens: the window that is served; clients compact by it.
        max_output_tokens: most tokens of one answer.
        max_turns: for clients that do not end on a closing text turn; the adapter's turn cap ends the others.
        request_timeout_sec: how long a client waits for one answer, or for the next byte of it.
        max_retries: how often a client repeats a failed request, where it can be told.
        environment: further variables of the agent's process; they win.
    """

    workdir: str
    session_id: str
    adapter_url: str
    model_label: str = "slime-actor"
    context_tokens: int = 65536
    max_output_tokens: int = 8192
    max_turns: int | None = None
    request_timeout_sec: int = 1800
    max_retries: int = 2
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def base_url(self) -> str:
        """The session's own root: what an Anthropic client takes as base URL."""
        return f"{self.adapter_url.rstrip('/')}/s/{quote(self.session_id, safe='')}"

    @property
    def openai_url(self) -> str:
        """What an OpenAI client takes as base URL."""
        return f"{self.base_url}/v1"

    def meta(self, name: str = "") -> str:
        """Path of `name` in the folder that the harness keeps."""
        return f"{self.workdir.rstrip('/')}/.harness/{name}".rstrip("/")


@dataclass(frozen=True)
class UserSettings:
    """What the user sets by ``SLIME_AGENT_<PREFIX>_TARBALL`` and its likes.

    Attributes:
        tarball: see `slime.agent.harness.install`.
        version: instead of the harness's own; ``latest`` is possible.
        extra_args: appended to the command line.
        extra_envs: further variables of the agent's process.
    """

    tarball: Path | None = None
    version: str | None = None
    extra_args: Sequence[str] = ()
    extra_envs: Mapping[str, str] = field(default_factory=dict)


def user_settings(prefix: str) -> UserSettings:
    """The settings of one harness; `_EXTRA_ARGS` is split as a shell does, `_EXTRA_ENVS` is a JSON object.

    Raises:
        ConfigError: `_EXTRA_ENVS` is no JSON object of strings.
    """
    name = f"SLIME_AGENT_{prefix}"
    tarball = os.environ.get(f"{name}_TARBALL")
    return UserSettings(
        tarball=Path(tarball) if tarball else None,
        version=os.environ.get(f"{name}_VERSION") or None,
        extra_args=tuple(shlex.split(os.environ.get(f"{name}_EXTRA_ARGS", ""))),
        extra_envs=_string_map(f"{name}_EXTRA_ENVS"),
    )


def _string_map(variable: str) -> dict[str, str]:
    remedy = 'give a JSON object: {"NAME": "value"}'
    try:
        value = json.loads(os.environ.get(variable) or "{}")
    except json.JSONDecodeError as error:
        raise ConfigError(f"not JSON: {error}", place=variable, remedy=remedy) from error
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise ConfigError("not a JSON object of strings", place=variable, remedy=remedy)
    return value


class BaseHarness(abc.ABC):
    """One agent. Implement the three methods; `run` calls them.

    Attributes:
        name: the agent's name in options and metrics.
        variables: the ``<PREFIX>`` of the agent's ``SLIME_AGENT_<PREFIX>_...`` variables.
    """

    name: str
    variables: str

    @abc.abstractmethod
    async def install_cli(self, sb: Sandbox) -> None:
        """Put the agent's program into the sandbox; does nothing where the wanted version is there.

        Raises:
            HarnessError: it cannot be installed.
        """

    @abc.abstractmethod
    async def write_config(self, sb: Sandbox, ctx: HarnessContext) -> None:
        """Write the agent's configuration below `ctx.meta()`, where it is not all in variables."""

    @abc.abstractmethod
    async def launch_and_wait(self, sb: Sandbox, ctx: HarnessContext, prompt: str, budget: float) -> int:
        """Run the agent on `prompt` for at most `budget` seconds; its exit code, -1 when time ran out."""

    async def run(
        self,
        sb: Sandbox,
        *,
        workdir: str,
        session_id: str,
        adapter_url: str,
        time_budget_sec: float,
        prompt: str,
        **options: Unpack[ContextOptions],
    ) -> int:
        """Ensure the user, whose the workdir becomes, write the configuration, launch.

        Returns:
            The agent's exit code; -1 when the budget ran out and all its processes were killed.

        Raises:
            HarnessError: the agent could not be started.
        """
        ctx = HarnessContext(workdir, session_id, adapter_url, **options)
        await ensure_agent_user(sb, workdir=workdir)
        await sb.write_file(ctx.meta(".gitignore"), "*\n", user=AGENT_USER)
        await self.write_config(sb, ctx)
        return await self.launch_and_wait(sb, ctx, prompt, time_budget_sec)


async def run_agent(
    sb: Sandbox,
    ctx: HarnessContext,
    command: Sequence[str],
    *,
    prompt: str,
    budget: float,
    env: Mapping[str, str],
    settings: UserSettings,
) -> int:
    """Run `command` in the workdir with the prompt on its standard input; output goes to the agent's log.

    Returns:
        The exit code; -1 when the budget ran out and the whole process tree was killed.

    Raises:
        HarnessError: the program is not in the sandbox or cannot be executed.
    """
    await sb.write_file(ctx.meta("prompt.md"), prompt, user=AGENT_USER)
    files = {name: shlex.quote(ctx.meta(name)) for name in ("prompt.md", "trajectory.jsonl", "stderr.log")}
    streams = f"< {files['prompt.md']} > {files['trajectory.jsonl']} 2> {files['stderr.log']}"
    program = shlex.join([*command, *settings.extra_args])
    start = f'cd {shlex.quote(ctx.workdir)} && export PATH="$PATH:{INSTALL_PREFIX}/bin" && exec'
    variables = {**env, **settings.extra_envs, **ctx.environment}
    code = await exec_and_wait(
        sb, f"{start} {program} {streams}", user=AGENT_USER, env=variables, budget=budget
    )
    if code in (CANNOT_RUN, NOT_FOUND):
        said = (await sb.read_file(ctx.meta("stderr.log"), user=AGENT_USER))[-TAIL_CHARACTERS:].strip()
        remedy = "call install_cli(sb) first, or use an image that has the agent"
        raise HarnessError(f"{command[0]} cannot be run: {said}", place=sb.sandbox_id, remedy=remedy)
    return code


async def agent_log(sb: Sandbox, workdir: str) -> str:
    """The log that the last run's agent wrote: one JSON object a line, for clients that have such a form."""
    return await sb.read_file(f"{workdir.rstrip('/')}/.harness/trajectory.jsonl", user=AGENT_USER)

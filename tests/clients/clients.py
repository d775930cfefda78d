"""Real clients, unmodified, all started alike: `run_client` runs one against an adapter, tells how it ended.

The command-line agents run by their harness, the SDK programs by one of this file. They are looked for in
``.cache/clients`` of the checkout, where `make clients` installs them; nothing is installed here.
"""

import asyncio
import json
import os
import time
from dataclasses import dataclass, replace
from pathlib import Path

from slime.agent.harness import HARNESSES, BaseHarness, HarnessContext, run_agent, user_settings
from slime.agent.harness.opencode import PROVIDER, OpencodeHarness, opencode_config
from tests.agent.harness.processes import ProcessSandbox
from tests.clients.sdk_programs import KINDS

CACHE = Path(__file__).parents[2] / ".cache" / "clients"
NODE_PROGRAMS = CACHE / "npm" / "bin"
PYTHON_PROGRAMS = CACHE / "venv" / "bin"
PROGRAM_OF = {
    "claude_code": NODE_PROGRAMS / "claude",
    "codex": NODE_PROGRAMS / "codex",
    "opencode": NODE_PROGRAMS / "opencode",
    "qwen_code": NODE_PROGRAMS / "qwen",
    "mini_swe_agent": PYTHON_PROGRAMS / "mini",
}
SDK_OF = {
    "openai": "openai",
    "anthropic": "anthropic",
    "claude_agent": "claude_agent_sdk",
    "openai_agents": "agents",
}


@dataclass(frozen=True)
class ClientRun:
    """How a client's run ended: exit code (-1 where time ran out), what it wrote, how long it took."""

    rc: int
    stdout: str
    stderr: str
    seconds: float


class SdkHarness(BaseHarness):
    """A program of `sdk_programs`, run by the Python that has the SDKs."""

    variables = "SDK"

    def __init__(self, name):
        self.name = name

    async def install_cli(self, sb):
        raise NotImplementedError("the SDKs are installed by `make clients`")

    async def write_config(self, sb, ctx: HarnessContext):
        return None

    async def launch_and_wait(self, sb, ctx, prompt, budget):
        command = (
            str(PYTHON_PROGRAMS / "python"),
            str(Path(__file__).with_name("sdk_programs.py")),
            self.name,
        )
        env = {"SDK_BASE_URL": ctx.base_url, "SDK_KEY": ctx.session_id, "SDK_MODEL": ctx.model_label}
        settings = user_settings(self.variables)
        return await run_agent(sb, ctx, command, prompt=prompt, budget=budget, env=env, settings=settings)


class OpencodeVariant(OpencodeHarness):
    """opencode by another provider package, with other options of it, or with the requests for a title that
    the harness turns off."""

    def __init__(self, package="@ai-sdk/openai-compatible", *, title=OpencodeHarness.title, **options):
        self.provider_package, self.title, self.options = package, title, options

    async def launch_and_wait(self, sb, ctx, prompt, budget):
        config = opencode_config(ctx)
        provider = config["provider"][PROVIDER]
        provider["npm"] = self.provider_package
        provider["options"] |= self.options
        environment = {"OPENCODE_CONFIG_CONTENT": json.dumps(config), **ctx.environment}
        return await super().launch_and_wait(sb, replace(ctx, environment=environment), prompt, budget)


OPENCODES = {
    "opencode_responses": OpencodeVariant("@ai-sdk/openai"),
    "opencode_anthropic": OpencodeVariant("@ai-sdk/anthropic"),
    "opencode_titled": OpencodeVariant(title=()),
    "opencode_hasty": OpencodeVariant(headerTimeout=3000, chunkTimeout=3000),
}
PROGRAM_OF |= dict.fromkeys(OPENCODES, PROGRAM_OF["opencode"])
ALL = {**HARNESSES, **OPENCODES, **{kind: SdkHarness(kind) for kind in KINDS}}
CLI_CLIENTS = tuple(HARNESSES)
SDK_CLIENTS = tuple(KINDS)


def available(name):
    """Whether the client is installed in the cache."""
    if name in PROGRAM_OF:
        return PROGRAM_OF[name].exists()
    sdk = next(package for prefix, package in reversed(SDK_OF.items()) if name.startswith(prefix))
    return any((CACHE / "venv" / "lib").glob(f"python3*/site-packages/{sdk}/__init__.py"))


async def run_client_async(name, *, base_url, session_id, workdir, prompt, timeout=120, env=None, **options):
    """As `run_client`, in the running loop."""
    workdir = Path(workdir)
    home = workdir / ".harness" / "home"
    home.mkdir(parents=True, exist_ok=True)
    path = os.pathsep.join((str(NODE_PROGRAMS), str(PYTHON_PROGRAMS), os.environ["PATH"]))
    sandbox = ProcessSandbox({"PATH": path, "HOME": str(home), **(env or {})})
    start = time.perf_counter()
    rc = await ALL[name].run(
        sandbox,
        workdir=str(workdir),
        session_id=session_id,
        adapter_url=base_url,
        time_budget_sec=timeout,
        prompt=prompt,
        **options,
    )
    seconds = time.perf_counter() - start
    logs = (workdir / ".harness" / "trajectory.jsonl", workdir / ".harness" / "stderr.log")
    return ClientRun(rc, *(log.read_text(errors="replace") for log in logs), seconds)


def run_client(name, *, base_url, session_id, workdir, prompt, timeout=120, env=None, **options):
    """Run client `name` on `prompt` in `workdir` against an adapter, for `timeout` seconds at most.

    Args:
        base_url: the adapter's root; the session's path prefix is added.
        env: further variables of the process.
        options: further fields of `HarnessContext`.
    """
    run = run_client_async(
        name,
        base_url=base_url,
        session_id=session_id,
        workdir=workdir,
        prompt=prompt,
        timeout=timeout,
        env=env,
        **options,
    )
    return asyncio.run(run)

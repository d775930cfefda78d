"""The agents' programs inside a local sandbox, which reaches the server through a passed socket only."""

import asyncio
from pathlib import Path

import pytest
from aiohttp import web

from slime.agent.harness import HARNESSES, agent_log
from slime.agent.sandbox import LocalSandbox
from tests.clients.clients import NODE_PROGRAMS, PYTHON_PROGRAMS
from tests.clients.mock_server import MockServer

pytestmark = pytest.mark.slow
PORT = 18001
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"


async def run_in_a_box(name, server):
    interpreter = (PYTHON_PROGRAMS / "python").resolve().parents[1]
    homes = [
        NODE_PROGRAMS.parent,
        PYTHON_PROGRAMS.parent,
        *([] if interpreter == Path("/usr") else [interpreter]),
    ]
    runner = web.AppRunner(server.app)
    await runner.setup()
    binds = {str(home): str(home) for home in homes}
    async with LocalSandbox(ports=[PORT], binds=binds) as sandbox:
        await web.SockSite(runner, sandbox.sockets[PORT]).start()
        code = await HARNESSES[name].run(
            sandbox,
            workdir=sandbox.workdir,
            session_id="session",
            adapter_url=f"http://127.0.0.1:{PORT}",
            time_budget_sec=120,
            prompt="Make the file.",
        )
        await runner.cleanup()
        made = await sandbox.read_file(f"{sandbox.workdir}/made.txt")
        changed = await sandbox.diff(exclude=(".git", ".harness"))
        return code, made, changed, await agent_log(sandbox, sandbox.workdir)


@pytest.mark.parametrize("name", HARNESSES)
def test_an_agent_works_in_a_box_without_network(name, require_client):
    require_client(name)
    server = MockServer(["echo hi > made.txt", *([SUBMIT] if name == "mini_swe_agent" else [])])
    code, made, changed, log = asyncio.run(run_in_a_box(name, server))
    assert code == 0, log
    assert made == "hi\n"
    assert changed.count("diff --git") == 1
    assert len(server.requests) == 2

"""The harness of the documentation is complete, short, and runs."""

import asyncio
import re
from pathlib import Path

import pytest
from aiohttp import web

from slime.agent.harness import HARNESSES
from tests.agent.harness.processes import ProcessSandbox
from tests.clients.mock_server import MockServer

PAGE = (Path(__file__).parents[3] / "docs/en/harness.md").read_text()


@pytest.fixture
def shown():
    """The example's names."""
    (text,) = re.findall(r"^```python harness\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    assert len(text.splitlines()) <= 65
    names = {}
    exec(compile(text, "harness.md", "exec"), names)
    return names


async def run_shown(shown, server, workdir):
    runner = web.AppRunner(server.app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    harness, sandbox = shown["TINY_AGENT"], ProcessSandbox()
    harness.path = str(workdir / "program" / "tiny_agent.py")
    await harness.install_cli(sandbox)
    code = await harness.run(
        sandbox,
        workdir=str(workdir),
        session_id="session",
        adapter_url=f"http://127.0.0.1:{runner.addresses[0][1]}",
        time_budget_sec=20,
        prompt="Make the file.",
    )
    await runner.cleanup()
    return code


def test_the_documented_harness_runs_an_agent(shown, tmp_path):
    server = MockServer(["echo hi > made.txt"])
    assert asyncio.run(run_shown(shown, server, tmp_path)) == 0
    assert (tmp_path / "made.txt").read_text() == "hi\n"
    assert [request["path"] for request in server.requests] == ["/s/session/v1/chat/completions"] * 2
    assert "All done." in (tmp_path / ".harness" / "trajectory.jsonl").read_text()


def test_the_page_names_every_harness_and_its_version():
    for harness in HARNESSES.values():
        assert f"`{harness.name.upper()}`" in PAGE
        assert harness.version in PAGE
        assert f"`{harness.variables}`" in PAGE

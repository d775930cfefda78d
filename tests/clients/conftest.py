"""The clients of the cache, and the server that plays their partner where no adapter is needed."""

import asyncio

import pytest
from aiohttp import web

from tests.clients.clients import available, run_client_async
from tests.clients.mock_server import MockServer


@pytest.fixture
def require_client():
    """A function that skips the test where the named client is not installed."""

    def require(name):
        if not available(name):
            pytest.skip(f"{name} is not installed: run `make clients`")

    return require


@pytest.fixture
def play(tmp_path):
    """A function that runs a client against a `MockServer` and gives both: `(ClientRun, MockServer)`."""

    async def against(server, name, prompt, options):
        runner = web.AppRunner(server.app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        try:
            return await run_client_async(
                name,
                base_url=f"http://127.0.0.1:{port}",
                session_id="session/1",
                workdir=tmp_path,
                prompt=prompt,
                **options,
            )
        finally:
            await runner.cleanup()

    def run(name, turns, *, prompt="Make the file.", refuse_with=None, **options):
        server = MockServer(turns, refuse_with=refuse_with)
        return asyncio.run(against(server, name, prompt, options)), server

    return run


@pytest.fixture
def repo(tmp_path):
    """A small program with an error: ``out.txt`` should greet with Hello."""
    folder = tmp_path / "repo"
    folder.mkdir()
    (folder / "greet.py").write_text('def greet(name):\n    return "Helo, " + name\n')
    program = 'from greet import greet\n\nopen("out.txt", "w", encoding="utf-8").write(greet("Zoë"))\n'
    (folder / "main.py").write_text(program)
    return folder

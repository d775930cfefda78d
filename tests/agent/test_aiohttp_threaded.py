"""An application on its own thread: errors of its start reach the caller; stopping it ends it."""

import socket
import urllib.request

import pytest
from aiohttp import web

from slime.agent.aiohttp_threaded import run_app_in_thread


def app(**options):
    made = web.Application(**options)

    async def hello(_):
        return web.Response(text="hello")

    made.router.add_get("/", hello)
    return made


def read(url):
    with urllib.request.urlopen(url, timeout=10) as response:
        return response.read()


def test_it_listens_on_loopback_until_it_is_stopped():
    handle = run_app_in_thread(app())
    assert handle.host == "127.0.0.1"
    assert read(handle.url) == b"hello"
    handle.stop()
    handle.stop()
    assert not handle.thread.is_alive()
    with pytest.raises(OSError):
        read(handle.url)


def test_a_given_socket_is_served():
    handle = run_app_in_thread(app(), sock=socket.create_server(("127.0.0.1", 0)))
    assert read(handle.url) == b"hello"
    handle.stop()


def test_a_port_that_is_taken_is_told():
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(OSError, match="in use"):
        run_app_in_thread(app(), port=taken.getsockname()[1])


def test_what_fails_at_the_start_is_raised():
    async def broken(_):
        raise RuntimeError("no database")

    made = app()
    made.on_startup.append(broken)
    with pytest.raises(RuntimeError, match="no database"):
        run_app_in_thread(made)

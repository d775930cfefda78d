"""What a router's client makes of answers that no router should give, and of workers that do not come."""

import contextlib
import socket
import threading

import pytest

from slime.errors import DeadlineError, EngineUnavailableError
from slime.serving.router_client import RouterClient
from tests.serving.routing import background_router, engine
from tests.serving.wire import wait_for


def test_a_router_that_dies_while_it_answers_is_unavailable():
    def answer(server):
        connection, _ = server.accept()
        with connection:
            connection.recv(1024)
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{")

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=answer, args=(server,))
        thread.start()
        with pytest.raises(EngineUnavailableError, match="IncompleteRead"):
            RouterClient(f"http://127.0.0.1:{server.getsockname()[1]}").workers()
        thread.join()


@contextlib.contextmanager
def mute():
    """The URL of a server that never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def test_a_worker_that_does_not_come_in_time_is_awaited_no_more():
    with background_router() as router, mute() as url:
        with pytest.raises(DeadlineError):
            router.client.add(url, timeout=0.2)
        wait_for(lambda: router.awaited == 0)


def test_a_worker_that_is_gone_is_awaited_no_more():
    with engine() as gone:
        pass
    with background_router() as router:
        with pytest.raises(EngineUnavailableError):
            router.client.add(gone.url)
        wait_for(lambda: router.awaited == 0)
        assert router.client.remove(gone.url) is False


def test_a_registration_under_way_can_be_taken_back():
    with background_router() as router:
        with mute() as url:
            registration = threading.Thread(target=suppressed, args=(router.client, url))
            registration.start()
            wait_for(lambda: router.awaited == 1 and router.client.has_added(url))
            assert router.client.remove(url) is True
            wait_for(lambda: router.awaited == 0)
        registration.join()


def suppressed(client, url):
    with contextlib.suppress(EngineUnavailableError):
        client.add(url, timeout=60.0)

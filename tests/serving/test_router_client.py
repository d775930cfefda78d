"""What a router's client makes of answers that no router should give."""

import socket
import threading

import pytest

from slime.errors import EngineUnavailableError
from slime.serving.router_client import RouterClient


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

"""A TCP proxy that breaks a client's connection at a chosen place of an answer."""

import contextlib
import socket
import threading

CHUNK = 1 << 16


class CuttingProxy:
    """Passes bytes to `port` of the loopback interface and back.

    The answer to request number `cut` (counted from 0) is passed up to the text `before`; when `when` comes,
    both connections are closed. A context manager; `url` is where it listens, `cuts` how often it has cut,
    which is once at most.
    """

    def __init__(self, port, *, cut, before, when):
        self.cuts = 0
        self._target = ("127.0.0.1", port)
        self._cut, self._before, self._when = cut, before.encode(), when.encode()
        self._requests = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def __enter__(self):
        threading.Thread(target=self._listen, daemon=True).start()
        return self

    def __exit__(self, *error):
        self._listener.close()

    def _listen(self):
        with contextlib.suppress(OSError):  # the listener was closed
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._target)
                said = bytearray()
                for serve in (self._ask, self._answer):
                    threading.Thread(target=serve, args=(client, server, said), daemon=True).start()

    def _ask(self, client, server, said):
        with contextlib.suppress(OSError):
            while data := client.recv(CHUNK):
                if data.startswith(b"POST "):
                    self._requests += 1
                    said.clear()
                server.sendall(data)
        _close(client, server)

    def _answer(self, client, server, said):
        with contextlib.suppress(OSError):
            while data := server.recv(CHUNK):
                passed = self._passed(said)
                said += data
                client.sendall(said[passed : self._passed(said)])
                if self._is_due() and self._when in said:
                    self.cuts += 1
                    client.shutdown(socket.SHUT_WR)  # all of it arrives; a reset would drop what was not read
                    server.close()
                    return
        _close(client, server)

    def _passed(self, said):
        """How much of an answer the client gets."""
        return said.index(self._before) if self._is_due() and self._before in said else len(said)

    def _is_due(self):
        return self._requests == self._cut + 1 and not self.cuts


def _close(*ends):
    for end in ends:
        with contextlib.suppress(OSError):  # the other direction may have closed it
            end.shutdown(socket.SHUT_RDWR)
        end.close()

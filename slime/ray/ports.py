"""Ports of engines, node by node from 15000 up, each found free by binding it on its node.

Invariant: no two engines of a machine are given the same port, not even while neither listens yet. Knows
addresses of machines; asks a function of theirs what is free there.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass

from slime.errors import EngineError

FIRST_PORT = 15000
LAST_PORT = 65535
DIST_INIT_PORTS = 30
"""SGLang takes the ports behind that of its process group too, as many as it has data-parallel schedulers
and some more."""
Probe = Callable[[int, int], int | None]
"""First port from which so many are free in a row, at or above another; None where there is none."""


@dataclass(frozen=True, kw_only=True)
class EnginePorts:
    """Ports of one engine process.

    Attributes:
        http: of the server.
        nccl: of its communicator.
        dist_init: first of the range of its process group, on the first node of the engine.
        bootstrap: where decode servers find a prefill server.
    """

    http: int
    nccl: int
    dist_init: int
    bootstrap: int


class PortBook:
    """What has been given out on each machine."""

    def __init__(self, first: int = FIRST_PORT) -> None:
        self._first = first
        self._next: dict[str, int] = {}
        self._lock = threading.Lock()

    def take(self, machine: str, count: int, probe: Probe) -> int:
        """The first of `count` ports in a row on a machine.

        Args:
            machine: its address; Ray nodes of one address share their ports.
            probe: `first_free`, called on that machine.

        Raises:
            EngineError: there are none left.
        """
        with self._lock:
            start = self._next.get(machine, self._first)
            port = probe(start, count)
            if port is None:
                raise EngineError(
                    f"has no {count} free ports in a row from {start} on",
                    place=f"machine {machine}",
                    remedy="end servers that listen there; `ss -ltnp` lists them",
                )
            self._next[machine] = port + count
            return port

    def engine(self, machine: str, probe: Probe, *, data_parallel: int = 1) -> EnginePorts:
        """The ports of one engine process.

        Args:
            data_parallel: its schedulers, each with a port behind `dist_init`.
        """
        return EnginePorts(
            http=self.take(machine, 1, probe),
            nccl=self.take(machine, 1, probe),
            bootstrap=self.take(machine, 1, probe),
            dist_init=self.take(machine, DIST_INIT_PORTS + data_parallel, probe),
        )


def first_free(start: int, count: int = 1) -> int | None:
    """The first port from `start` on of which `count` in a row can be bound on all addresses of this machine;
    None where there is none."""
    port = start
    while port + count - 1 <= LAST_PORT:
        taken = next((one for one in range(port + count - 1, port - 1, -1) if not is_free(one)), None)
        if taken is None:
            return port
        port = taken + 1
    return None


def is_free(port: int) -> bool:
    """Whether the port can be bound, for IPv4 and, where the machine has it, IPv6."""
    families = [(socket.AF_INET, "0.0.0.0")]
    families += [(socket.AF_INET6, "::")] if socket.has_ipv6 else []
    return all(_can_bind(family, address, port) for family, address in families)


def _can_bind(family: socket.AddressFamily, address: str, port: int) -> bool:
    try:
        server = socket.socket(family, socket.SOCK_STREAM)
    except OSError:  # the family is not there, so nobody listens on it
        return True
    with contextlib.closing(server):
        if family == socket.AF_INET6:
            server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        # As servers do: a port whose last connections linger is free, one with a listener is not.
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            server.bind((address, port))
        except OSError as error:
            return error.errno == errno.EADDRNOTAVAIL  # IPv6 is switched off
    return True


def own_address() -> str:
    """The IP address under which other machines reach this one; loopback where it has no route.

    Nothing is sent: connecting a datagram socket only chooses the interface.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # of the block that is reserved for documentation
        except OSError:
            return _named_address()
        return str(probe.getsockname()[0])


def _named_address() -> str:
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return "127.0.0.1"

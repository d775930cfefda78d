"""`Stands`: where engines listen: hosts and ports of each, on one machine or on those of a placement.

Invariant: no two engines of a run are given the same port of a machine. Asks the engines' own actors what is
free where they are.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from slime.ray.hands import Hands
from slime.ray.placement import Placement
from slime.ray.ports import FIRST_PORT, PortBook
from slime.serving.launch import LaunchSettings, Stand

PORTS_OF_RUN, RUNS = 64, 256


class Stands:
    """Finds places.

    Args:
        placement: None puts every engine on this machine, reached by loopback.
    """

    def __init__(self, settings: LaunchSettings, hands: Hands, placement: Placement | None) -> None:
        self._settings, self._hands = settings, hands
        self._is_placed = placement is not None
        self._ports = PortBook(FIRST_PORT if self._is_placed else _first_port())

    def find(self, name: str, parts: Sequence[Any]) -> list[Stand]:
        """One stand a part of an engine, the first for the part that answers requests.

        Args:
            name: of the engine.
            parts: its actors, one a node.
        """
        if not self._is_placed and self._settings.kind == "embedded":
            return [Stand(port=self._settings.embedded.port)]
        hosts = self._addresses(name, parts) if self._is_placed else [Stand().host]
        stands: list[Stand] = []
        for rank, (host, part) in enumerate(zip(hosts, parts, strict=True)):

            def free(start: int, count: int, part: Any = part) -> int | None:
                call = {name: part.free_ports.remote(start, count)}
                found: list[int | None] = self._hands.wait_all("free ports", call)
                return found[0]

            ports = self._ports.engine(host, free)
            stands.append(
                Stand(
                    host=host,
                    port=ports.http,
                    nccl_port=ports.nccl,
                    bootstrap_port=ports.bootstrap,
                    base_gpu=0,
                    node_rank=rank,
                    nnodes=len(hosts),
                    meeting=f"{host}:{ports.dist_init}" if rank == 0 else stands[0].meeting,
                )
            )
        return stands

    def _addresses(self, name: str, parts: Sequence[Any]) -> list[str]:
        calls = {part_name(name, index): part.address.remote() for index, part in enumerate(parts)}
        return self._hands.wait_all("address of an engine", calls)


def part_name(name: str, part: int) -> str:
    """What a part of an engine is called."""
    return name if part == 0 else f"{name} node {part}"


def log_name(label: str, name: str, part: int, engines: int) -> str:
    """The file name of a part's log, of a pool of so many engines."""
    words = [label.replace(" ", "_")]
    words += [] if engines == 1 else [name.replace("/", "_")]
    return "_".join([*words, *([str(part)] if part else [])])


def _first_port() -> int:
    """Where a run on one machine looks for ports: not where other runs do, since what is free when it is
    looked for may not be so when it is used."""
    return FIRST_PORT + PORTS_OF_RUN * (os.getpid() % RUNS)

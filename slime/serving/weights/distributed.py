"""Weights through a process group of the trainer's first rank and all ranks of all engines.

Invariant: group and engines are the same set; when an engine dies, the others meet in a new group and get
the bucket of the failure again, so that one engine's death costs the others nothing but time (one that hangs
takes along those that gloo reaches through it). A wait on the group ends with the update's deadline.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar
from urllib.parse import urlsplit

from slime.errors import EngineError, EngineUnavailableError
from slime.serving.weights.client import WeightClient
from slime.serving.weights.crew import Crew
from slime.serving.weights.group import WeightGroup, open_store
from slime.serving.weights.meeting import in_thread, together
from slime.serving.weights.outgoing import Outgoing, buckets
from slime.serving.weights.sync import WeightSource
from slime.serving.weights.transport import Update, drain

GROUP = "slime-pp_0"


class DistributedTransport:
    """Broadcasts, a bucket a call."""

    has_session = True
    takes_weights = True
    request_fields: ClassVar[Mapping[str, str]] = {}

    def __init__(self, buffer_size: int) -> None:
        self._buffer_size = buffer_size
        self._group: WeightGroup | None = None
        self._members: list[str] = []

    def stage(self, update: Update) -> None:
        """Nothing can be done before."""

    def send(self, update: Update) -> None:
        """Broadcast all buckets; each goes round again until all engines that are left have it."""
        for bucket, is_last in buckets(update.taken(), self._buffer_size):
            while update.crew.members and not self._sent(update, bucket, is_last):
                self._end()

    def follow(self, source: WeightSource, version: int) -> None:
        """Go through the weights."""
        drain(source.weights())

    def forget(self) -> None:
        """Leave the group: the next update makes another."""
        self._end()

    def close(self) -> None:
        """Leave the group."""
        self._end()

    def _sent(self, update: Update, bucket: list[Outgoing], is_last: bool) -> bool:
        """Whether all engines that were there took the bucket."""
        crew = update.crew
        tensors = [item.converted() for item in bucket]
        group = self._met(crew, "nccl" if tensors[0].is_cuda else "gloo")
        if group is None:
            return False
        body = {
            "names": [item.name for item in bucket],
            "dtypes": [str(item.dtype).removeprefix("torch.") for item in bucket],
            "shapes": [list(item.tensor.shape) for item in bucket],
            "group_name": GROUP,
            **update.naming(is_last),
        }
        timeout = crew.share("weights")
        if not timeout:
            return False
        calls = crew.start("weights", lambda e: e.post_weights("/update_weights_from_distributed", body))

        def broadcast() -> bool:
            group.broadcast(tensors, timeout)
            return True

        own = in_thread(broadcast, "slime-broadcast")
        return together(crew, own, calls, self._end) is not None

    def _met(self, crew: Crew, backend: str) -> WeightGroup | None:
        """The group of all members; None when one did not come to it, and is no member any more."""
        names = [engine.name for engine in crew.members]
        if self._group is not None and names == self._members:
            return self._group
        self._end()
        crew.each("leaving an old group", _leave)
        timeout = crew.share("joining the group")
        members, size = crew.members, crew.world_size + 1
        if not (members and timeout):
            return None
        address = _own_address([engine.endpoint.url for engine in members])
        store = open_store(address, size, timeout)
        ranks = _first_ranks(members)
        common = {"master_address": address, "master_port": store.port, "world_size": size}
        common |= {"group_name": GROUP, "backend": backend}

        def join(engine: WeightClient) -> Any:
            return engine.post("/init_weights_update_group", common | {"rank_offset": ranks[engine.name]})

        calls = crew.start("joining the group", join)

        def meet() -> WeightGroup:
            return WeightGroup(store, rank=0, size=size, name=GROUP, backend=backend, timeout=timeout)

        self._group = together(crew, in_thread(meet, "slime-group"), calls, lambda: None)
        self._members = [engine.name for engine in members]
        return self._group

    def _end(self) -> None:
        """Whoever still waits for this rank is told."""
        if self._group is not None:
            self._group.close()
        self._group, self._members = None, []


def _leave(engine: WeightClient) -> None:
    """An engine without a group refuses; one that is gone is found at the next call."""
    with contextlib.suppress(EngineError):
        engine.post("/destroy_weights_update_group", {"group_name": GROUP})


def _first_ranks(members: Sequence[WeightClient]) -> dict[str, int]:
    ranks, rank = {}, 1
    for engine in members:
        ranks[engine.name] = rank
        rank += engine.endpoint.world_size
    return ranks


def _address_towards(url: str) -> str:
    host = urlsplit(url)
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host.hostname, host.port or 80))  # sends nothing
            return str(probe.getsockname()[0])
    except OSError as error:
        raise EngineUnavailableError(f"no way there: {error}", place=url) from error


def _own_address(urls: Sequence[str]) -> str:
    """The address under which engines see this machine; loopback only if all are on it."""
    found = [_address_towards(url) for url in urls]
    return next((address for address in found if not address.startswith("127.")), found[0])

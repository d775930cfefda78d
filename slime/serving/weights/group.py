"""A process group of a trainer and engines, beside whatever groups the process has: gloo on CPU, NCCL on
GPUs.

Invariant: its keys in the store are those of SGLang's custom groups, so that stock SGLang joins it; it is
entered in none of torch's process-wide tables; every operation has a deadline. Used by trainer and embedded
engine. Knows tensors, and nothing of HTTP.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import BroadcastOptions, PrefixStore, Store, TCPStore

from slime.errors import EngineError

_DEVICES = {"gloo": "cpu", "nccl": "cuda"}
"""The first device of a backend, which torch names the backend's keys by."""


class WeightGroup:
    """Rank 0 gives weights, the others take them."""

    def __init__(
        self, store: TCPStore, *, rank: int, size: int, name: str, backend: str, timeout: float
    ) -> None:
        """Connect with the others; returns when all are there.

        Args:
            backend: ``gloo`` or ``nccl``.
            timeout: seconds that this takes at most.

        Raises:
            EngineError: they were not there in time, or torch lacks the backend.
        """
        # torch.distributed.distributed_c10d: a custom group has the prefixes of its maker, of its name and of
        # the device, one inside the other.
        keys = PrefixStore(f"{_DEVICES[backend]}/", PrefixStore(f"{name}/", PrefixStore(name, store)))
        self._name, self._store = name, store
        try:
            self._group = _backend(backend, keys, rank, size, timedelta(seconds=timeout))
        except (RuntimeError, ImportError) as error:
            raise EngineError(f"did not come together: {error}", place=f"group {name}") from error

    def broadcast(self, tensors: list[torch.Tensor], timeout: float) -> None:
        """Give (rank 0) or take the values of dense tensors, in their order.

        Raises:
            EngineError: another rank is gone, or was not there in time.
        """
        try:
            for work in [self._begin(tensor, timeout) for tensor in tensors]:
                work.wait(timedelta(seconds=timeout))
        except RuntimeError as error:
            raise EngineError(f"a broadcast failed: {error}", place=f"group {self._name}") from error

    def close(self) -> None:
        """Leave; whoever waits for this rank is told."""
        del self._group

    def _begin(self, tensor: torch.Tensor, timeout: float) -> Any:
        options = BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        options.timeout = timedelta(seconds=timeout)
        return self._group.broadcast([tensor], options)


def open_store(host: str, size: int, timeout: float) -> TCPStore:
    """The place where the group meets, in this process; its `port` is a free one.

    Raises:
        EngineError: it cannot be opened.
    """
    seconds = timedelta(seconds=timeout)
    try:
        return TCPStore(host, 0, size, is_master=True, wait_for_workers=False, timeout=seconds)
    except RuntimeError as error:
        raise EngineError(f"cannot open the group's store: {error}", place=host) from error


def find_store(host: str, port: int, timeout: float) -> TCPStore:
    """The store that rank 0 opened.

    Raises:
        EngineError: it is not there.
    """
    try:
        return TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout))
    except RuntimeError as error:
        raise EngineError(f"cannot reach the group's store: {error}", place=f"{host}:{port}") from error


def _backend(name: str, keys: Store, rank: int, size: int, timeout: timedelta) -> Any:
    if name == "nccl":
        from torch._C._distributed_c10d import ProcessGroupNCCL

        options = ProcessGroupNCCL.Options()
        options._timeout = timeout
        return ProcessGroupNCCL(keys, rank, size, options)
    from torch._C._distributed_c10d import ProcessGroupGloo

    return ProcessGroupGloo(keys, rank, size, timeout)

"""The processes that train one model together, and what they say to each other besides gradients.

Invariant: every method is called by all ranks in the same order; an error of one is raised on all. A process
that trains alone is one rank, and then nothing here communicates. Knows nothing of models or of Ray.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Generic, TypeVar, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from slime.errors import ConfigError, DataError, RankLostError, SlimeError

T = TypeVar("T")
_LOST = ("gloo", "NCCL", "Connection closed", "Connection reset", "Broken pipe", "Timed out", "timed out")


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process's number among `size`."""

    rank: int = 0
    size: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this process speaks for all."""
        return self.rank == 0

    def gather(self, value: T) -> list[T]:
        """What each rank gave, by rank."""
        if self.size == 1:
            return [value]
        found: list[T | None] = [None] * self.size
        dist.all_gather_object(found, value)
        return cast(list[T], found)

    def sum_(self, values: torch.Tensor) -> None:
        """Replace `values` by the sum over the ranks."""
        if self.size > 1:
            dist.all_reduce(values)

    def check_same(self, digest: int, what: str) -> None:
        """Compare what every rank must have been given alike.

        Raises:
            DataError: on all ranks, where one has another digest.
        """
        if len(set(self.gather(digest))) > 1:
            raise DataError(
                f"the train processes were given different {what}",
                place=f"rank {self.rank} of {self.size}",
                remedy="training hooks run in each of them and must do the same: no random numbers",
            )

    def first(self, action: Callable[[], T]) -> T:
        """The result of `action`, which the first rank alone runs.

        Raises:
            SlimeError: the error of the first rank.
        """
        outcome: _Outcome[T] = _attempt(action) if self.is_first else _Outcome()
        return self.gather(outcome)[0].result()

    def each(self, action: Callable[[], T]) -> list[T]:
        """The results of `action`, which every rank runs, by rank.

        Raises:
            SlimeError: the error of the first rank that failed.
        """
        return [outcome.result() for outcome in self.gather(_attempt(action))]


ALONE = Ranks()


@dataclass(frozen=True, slots=True)
class _Outcome(Generic[T]):
    value: T | None = None
    error: SlimeError | None = None

    def result(self) -> T:
        if self.error is not None:
            raise self.error
        return cast(T, self.value)


def _attempt(action: Callable[[], T]) -> _Outcome[T]:
    try:
        return _Outcome(value=action())
    except SlimeError as error:
        return _Outcome(error=error)


LOOPBACK = "127.0.0.1"


def open_store(host: str, size: int, timeout: float) -> TCPStore:
    """The place where `size` ranks meet, in the first rank's process; its `port` is a free one."""
    return TCPStore(host, 0, size, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout))


def local_device(ranks: Ranks) -> torch.device:
    """The device of a rank of this machine: its own GPU, or the CPU where there is none.

    Raises:
        ConfigError: there are fewer GPUs than ranks.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if ranks.size > count:
        raise ConfigError(
            f"asks for {ranks.size} train processes, and there are {count} GPUs",
            place="--actor-num-gpus-per-node",
            remedy=f"give at most {count}",
        )
    device = torch.device("cuda", ranks.rank)
    torch.cuda.set_device(device)
    return device


def join(ranks: Ranks, store: TCPStore, *, device: torch.device, timeout: float) -> None:
    """Connect with the other ranks of this machine; over gloo for tensors on CPU, NCCL for those on CUDA.

    Args:
        timeout: seconds that a rank waits for the others in one operation.
    """
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(
        backend, store=store, rank=ranks.rank, world_size=ranks.size, timeout=timedelta(seconds=timeout)
    )


def find_store(host: str, port: int, timeout: float) -> TCPStore:
    """The store that the first rank opened."""
    return TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout))


def summed(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Sums by name of what the ranks found; one that has no row of a kind may lack its names."""
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: sum(part.get(name, 0.0) for part in parts) for name in names}


@contextmanager
def naming_lost_ranks(ranks: Ranks, work: str) -> Iterator[None]:
    """Failures of communication become one error that says so; its cause is in another rank.

    Raises:
        RankLostError: another rank ended, or did not come to the same operation in time.
    """
    try:
        yield
    except RuntimeError as error:
        if ranks.size == 1 or not any(sign in str(error) for sign in _LOST):
            raise
        raise RankLostError(
            f"rank {ranks.rank} of {ranks.size} lost contact with another during {work}: {error}",
            remedy="see what the other rank's log says; --distributed-timeout-minutes is how long ranks wait",
        ) from error

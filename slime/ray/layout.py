"""Which GPUs of a cluster a run takes, and what sits on which: the layout of a run.

Invariant: a bundle is one GPU; every train rank has one, every engine has its own, and an engine spans
consecutive bundles of one node or whole nodes. Knows neither Ray nor processes.
"""

from __future__ import annotations

import ipaddress
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

from slime.errors import ConfigError

TRAIN_SHARE, ENGINE_SHARE = 0.4, 0.2
"""Of a GPU and of a CPU: a trainer, a critic and an engine fit on one of each, and no second of them does."""


class Mode(Enum):
    """Who is there, and whether they share GPUs."""

    TRAIN_ONLY = "train only"
    EXTERNAL = "external engines"
    ROLLOUT_ONLY = "rollout only"
    COLOCATE = "colocate"
    SEPARATE = "separate"


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Bundles in their order: train ranks take the first `train_gpus`, engines `rollout_gpus` from
    `rollout_offset` on."""

    mode: Mode
    bundles: int
    rollout_offset: int
    train_gpus: int
    rollout_gpus: int

    def line(self) -> str:
        """The layout as a person reads it."""
        parts = [f"trainer {self.train_gpus}"] if self.train_gpus else []
        parts += [f"engines {self.rollout_gpus}"] if self.rollout_gpus else []
        return f"{_gpus(self.bundles)} ({', '.join(parts)}; {self.mode.value})"


def layout_of(mode: Mode, *, train_gpus: int, rollout_gpus: int) -> Layout:
    """The table of layouts: how many bundles there are, and where engines begin."""
    table = {
        Mode.TRAIN_ONLY: (train_gpus, 0),
        Mode.EXTERNAL: (train_gpus, train_gpus),
        Mode.ROLLOUT_ONLY: (rollout_gpus, 0),
        Mode.COLOCATE: (max(train_gpus, rollout_gpus), 0),
        Mode.SEPARATE: (train_gpus + rollout_gpus, train_gpus),
    }
    bundles, offset = table[mode]
    return Layout(
        mode=mode,
        bundles=bundles,
        rollout_offset=offset,
        train_gpus=0 if mode is Mode.ROLLOUT_ONLY else train_gpus,
        rollout_gpus=0 if mode in (Mode.TRAIN_ONLY, Mode.EXTERNAL) else rollout_gpus,
    )


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """One GPU.

    Attributes:
        index: of the bundle in the placement group.
        node: Ray's id of the node.
        address: IP address of the node.
        gpu: id of the GPU on the node.
    """

    index: int
    node: str
    address: str
    gpu: str


def in_order(bundles: Sequence[Bundle]) -> tuple[Bundle, ...]:
    """Sorted by address, node and GPU: neighbours in this order are neighbours in the machine."""
    return tuple(sorted(bundles, key=lambda bundle: (_by_address(bundle), bundle.node, _by_gpu(bundle))))


@dataclass(frozen=True, kw_only=True)
class EngineSlots:
    """What one engine takes: `gpus` bundles in their order, from number `first` on. What no engine takes (a
    placeholder) stays free."""

    name: str
    first: int
    gpus: int


@dataclass(frozen=True, kw_only=True)
class EngineSeat:
    """Where one engine sits."""

    name: str
    bundles: tuple[Bundle, ...]

    @property
    def parts(self) -> list[tuple[Bundle, ...]]:
        """Its bundles by node: one process each, the first leads."""
        return [tuple(part) for _, part in itertools.groupby(self.bundles, key=lambda bundle: bundle.node)]


@dataclass(frozen=True, kw_only=True)
class Seating:
    """Who sits where.

    Attributes:
        train: by rank.
        engines: in the order of their slots.
    """

    train: tuple[Bundle, ...]
    engines: tuple[EngineSeat, ...]


def seat(
    layout: Layout,
    engines: Sequence[EngineSlots],
    bundles: Sequence[Bundle],
    *,
    ranks_per_node: int,
    gpus_per_node: int,
) -> Seating:
    """Give bundles to train ranks and engines.

    Args:
        bundles: of the placement group, in any order.
        ranks_per_node: train ranks that must share a machine.
        gpus_per_node: of a whole node; an engine over several nodes takes all of each.

    Raises:
        ConfigError: a group of ranks or an engine would be split badly, or engines take more than there is.
    """
    ordered = in_order(bundles)
    train = ordered[: layout.train_gpus]
    for start in range(0, len(train), ranks_per_node):
        _check_ranks(start, train[start : start + ranks_per_node])
    seats = []
    for one in engines:
        _check_slots(one, layout)
        own = ordered[one.first : one.first + one.gpus]
        seats.append(EngineSeat(name=one.name, bundles=own))
        _check_engine(seats[-1], gpus_per_node, layout)
    return Seating(train=train, engines=tuple(seats))


def moved(old: EngineSeat, bundles: Sequence[Bundle], layout: Layout, gpus_per_node: int) -> EngineSeat:
    """The seat of an engine whose bundles are elsewhere now.

    Raises:
        ConfigError: they would split it badly.
    """
    new = replace(old, bundles=in_order(bundles))
    _check_engine(new, gpus_per_node, layout)
    return new


def check_shared_gpus(layout: Layout, way: str) -> None:
    """Weights reach engines that take turns with the trainer on its GPUs.

    Args:
        way: the transport of weights.

    Raises:
        ConfigError: they would not.
    """
    if layout.mode is not Mode.COLOCATE:
        return
    beyond = layout.rollout_gpus > layout.train_gpus
    if way == "nccl":
        reason = "nccl takes no two ranks on one GPU, and trainer and engines share some"
    elif way == "tensor" and beyond:
        reason = "tensor reaches no engine on GPUs that the trainer does not have"
    else:
        return
    raise ConfigError(
        f"weights cannot go from the trainer to the engines of {layout.line()}: {reason}",
        place="--colocate",
        remedy="--update-weight-transport disk"
        + (f", or --rollout-num-gpus {layout.train_gpus} at most" if beyond else ", or leave it out"),
    )


def _check_slots(one: EngineSlots, layout: Layout) -> None:
    end = layout.rollout_offset + layout.rollout_gpus
    if not layout.rollout_offset <= one.first <= one.first + one.gpus <= end:
        raise ConfigError(
            f"takes the GPUs from number {one.first} on, and engines have those from "
            f"{layout.rollout_offset} to {end - 1}",
            place=f"engine {one.name} of {_gpus(one.gpus)}",
            remedy="let --rollout-num-gpus be the sum of what all engines and placeholders take",
        )


def _check_engine(one: EngineSeat, gpus_per_node: int, layout: Layout) -> None:
    parts = one.parts
    if len(parts) == 1 or all(len(part) == gpus_per_node for part in parts):
        return
    spread = ", ".join(f"{len(part)} on {part[0].address or part[0].node}" for part in parts)
    separate = layout.mode is Mode.SEPARATE
    beside = f"; engines begin behind {layout.train_gpus} of training" if separate else ""
    raise ConfigError(
        f"would be split: {spread}. An engine sits on one node or on whole nodes of {gpus_per_node} GPUs "
        f"(--num-gpus-per-node){beside}",
        place=f"engine {one.name} of {_gpus(len(one.bundles))}",
        remedy=f"let --rollout-num-gpus-per-engine divide {gpus_per_node} or be a multiple of it, and the "
        "GPUs before it (--actor-num-gpus-per-node, smaller engines, placeholders) fill up to its size; sort "
        "groups by size, the largest first",
    )


def _check_ranks(start: int, ranks: tuple[Bundle, ...]) -> None:
    nodes = {bundle.node: bundle.address for bundle in ranks}
    if len(nodes) == 1:
        return
    places = ", ".join(address or node for node, address in nodes.items())
    raise ConfigError(
        f"the GPUs of train ranks {start} to {start + len(ranks) - 1} are on {len(nodes)} nodes: {places}",
        place=f"--actor-num-gpus-per-node {len(ranks)}",
        remedy="give at most the GPUs that a node has free, and more --actor-num-nodes",
    )


def _by_address(bundle: Bundle) -> tuple[int, int, str]:
    try:
        return (0, int(ipaddress.ip_address(bundle.address)), "")
    except ValueError:
        return (1, 0, bundle.address)


def _by_gpu(bundle: Bundle) -> tuple[int, int, str]:
    return (0, int(bundle.gpu), "") if bundle.gpu.isdecimal() else (1, 0, bundle.gpu)


def _gpus(count: int) -> str:
    return "1 GPU" if count == 1 else f"{count} GPUs"

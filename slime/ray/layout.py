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


def assumed_bundles(count: int, gpus_per_node: int) -> tuple[Bundle, ...]:
    """The bundles of full nodes of one size, for checks before there is a cluster."""
    return tuple(
        Bundle(index=i, node=f"node {i // gpus_per_node}", address="", gpu=str(i % gpus_per_node))
        for i in range(count)
    )


@dataclass(frozen=True, kw_only=True)
class SlotGroup:
    """Engines of one kind.

    Attributes:
        gpus: all of its engines together.
        is_placeholder: takes its GPUs, and no engine is there.
    """

    name: str
    gpus: int
    gpus_per_engine: int
    is_placeholder: bool = False


@dataclass(frozen=True, kw_only=True)
class EngineSeat:
    """Where one engine sits.

    Attributes:
        is_shared: whether a train rank sits on one of its GPUs too.
    """

    name: str
    group: str
    bundles: tuple[Bundle, ...]
    is_shared: bool = False

    @property
    def parts(self) -> list[tuple[Bundle, ...]]:
        """Its bundles by node: one process each, the first leads."""
        return [tuple(part) for _, part in itertools.groupby(self.bundles, key=lambda bundle: bundle.node)]


@dataclass(frozen=True, kw_only=True)
class Seating:
    """Who sits where.

    Attributes:
        train: by rank.
        engines: in the order of their groups.
    """

    train: tuple[Bundle, ...]
    engines: tuple[EngineSeat, ...]


def seat(
    layout: Layout,
    groups: Sequence[SlotGroup],
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
        ConfigError: groups do not add up, or a group of ranks or an engine would be split badly.
    """
    ordered = in_order(bundles)
    train = ordered[: layout.train_gpus]
    for start in range(0, len(train), ranks_per_node):
        _check_ranks(start, train[start : start + ranks_per_node])
    wanted = sum(group.gpus for group in groups)
    if wanted != layout.rollout_gpus:
        raise ConfigError(
            f"is {layout.rollout_gpus}, and the groups of engines take {wanted} GPUs together",
            place="--rollout-num-gpus",
            remedy=f"make both equal; placeholder groups take what is left over, {wanted} is what they need",
        )
    seats, position = [], layout.rollout_offset
    for group in groups:
        seats += _seats_of(group, ordered, position, layout, gpus_per_node)
        position += group.gpus
    return Seating(train=train, engines=tuple(seats))


def moved(old: EngineSeat, bundles: Sequence[Bundle], layout: Layout, gpus_per_node: int) -> EngineSeat:
    """The seat of an engine whose bundles are elsewhere now.

    Raises:
        ConfigError: they would split it badly.
    """
    new = replace(old, bundles=in_order(bundles))
    _check_engine(new, gpus_per_node, layout)
    return new


def _seats_of(
    group: SlotGroup, ordered: tuple[Bundle, ...], position: int, layout: Layout, gpus_per_node: int
) -> list[EngineSeat]:
    size = group.gpus_per_engine
    if group.is_placeholder:
        return []
    if group.gpus % size:
        raise ConfigError(
            f"{_gpus(group.gpus)} do not divide by engines of {size}",
            place=f"engines {group.name}",
            remedy="let the GPUs of the group be a multiple of --rollout-num-gpus-per-engine",
        )
    seats = [
        EngineSeat(
            name=f"{group.name}-{number}",
            group=group.name,
            bundles=ordered[start : start + size],
            is_shared=start < layout.train_gpus,
        )
        for number, start in enumerate(range(position, position + group.gpus, size))
    ]
    for one in seats:
        _check_engine(one, gpus_per_node, layout)
    return seats


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
        place=f"engine {one.name} of {len(one.bundles)} GPUs",
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

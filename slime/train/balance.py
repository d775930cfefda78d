"""Items go to ranks and their micro-batches: longest first to the lightest rank (LPT), kept on a heap.

Invariant: every rank gets the same number of micro-batches, none over its limits unless its one item is, and
none empty while there are items enough. The result depends on the given order of items only, never on chance.
Torch-free; knows sizes and costs, nothing of samples, rollouts or steps.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a micro-batch may hold: tokens and items; None is no limit."""

    tokens: int | None = None
    items: int | None = None


class Item(NamedTuple):
    """One thing to place: a tuple, as a thousand of them are made a step.

    Attributes:
        name: what the result calls it.
        tokens: counts against the limit of a micro-batch.
        rank_cost: what is balanced over ranks.
        batch_cost: what is balanced over the micro-batches of a rank.
    """

    name: int
    tokens: int
    rank_cost: float
    batch_cost: float


@dataclass(slots=True)
class _Batch:
    names: list[int] = field(default_factory=list)
    tokens: int = 0
    cost: float = 0


def spread(items: Sequence[Item], *, ranks: int, group: int, limits: Limits) -> list[list[list[int]]]:
    """Names in micro-batches, [ranks][micro-batches][names]; counts are equal and a multiple of `group`.

    Each item goes, in the given order, to the lightest rank that has room. Given the most expensive first,
    this is LPT: without limits the heaviest rank is above the mean by (1 - 1/ranks) of the largest cost at
    most (Graham, SIAM J. Appl. Math. 17, 1969). The count is searched from a lower bound up.
    Micro-batches of a rank are ordered from the most expensive to the cheapest, so that ranks that run in
    lockstep meet like with like. Empty ones exist only if items are fewer than micro-batches; they come last.
    """
    fewest = _fewest(items, ranks, group, limits)
    count, failed, stride = fewest, fewest - group, group
    while (placed := _loose_or_tight(items, ranks, count, limits)) is None:
        count, failed, stride = count + stride, count, 2 * stride
    while count - failed > group:
        middle = failed + (count - failed) // (2 * group) * group
        attempt = _loose_or_tight(items, ranks, middle, limits)
        if attempt is None:
            failed = middle
        else:
            count, placed = middle, attempt
    return [[batch.names for batch in sorted(rank, key=_cost, reverse=True)] for rank in placed]


def imbalance(loads: Sequence[float]) -> float:
    """Largest load over the mean, less 1; 0 for no load at all."""
    total = sum(loads)
    return max(loads) * len(loads) / total - 1 if total else 0.0


def _fewest(items: Sequence[Item], ranks: int, group: int, limits: Limits) -> int:
    """A lower bound of the micro-batches of a rank. At most k - 1 items share one if each is over cap / k."""
    batches = 1
    if limits.items is not None:
        batches = max(batches, -(-len(items) // limits.items))
    if limits.tokens is not None:
        cap = limits.tokens
        batches = max(batches, -(-sum(min(item.tokens, cap) for item in items) // cap))
        for k in (2, 3):
            large = sum(k * item.tokens > cap for item in items)
            batches = max(batches, -(-large // (k - 1)))
    return -(-batches // (ranks * group)) * group


def _loose_or_tight(
    items: Sequence[Item], ranks: int, count: int, limits: Limits
) -> list[list[_Batch]] | None:
    """Balanced micro-batches if all find room that way, else those that are packed best."""
    loose = _place(items, ranks, count, limits, tight=False)
    return _place(items, ranks, count, limits, tight=True) if loose is None else loose


def _place(
    items: Sequence[Item], ranks: int, count: int, limits: Limits, *, tight: bool
) -> list[list[_Batch]] | None:
    """All items in `count` micro-batches a rank, or None if one finds no room.

    The lightest micro-batch with room takes the item; with `tight` the fullest, which packs better.
    Once there are no more items left than empty micro-batches, each opens one.
    """
    preference = _fullness if tight else _cost
    placed = [[_Batch() for _ in range(count)] for _ in range(ranks)]
    heap: list[tuple[float, int]] = [(0.0, rank) for rank in range(ranks)]
    empty, left = ranks * count, len(items)
    for item in items:
        passed = []
        while (batch := _room(placed[heap[0][1]], item, limits, opens=left <= empty)) is None:
            passed.append(heapq.heappop(heap))
            if not heap:
                return None
        empty -= not batch.names
        left -= 1
        batch.names.append(item.name)
        batch.tokens += item.tokens
        batch.cost += item.batch_cost
        load, rank = heap[0]
        placed[rank].sort(key=preference)
        heapq.heapreplace(heap, (load + item.rank_cost, rank))
        for entry in passed:
            heapq.heappush(heap, entry)
    return placed


def _room(batches: Iterable[_Batch], item: Item, limits: Limits, *, opens: bool) -> _Batch | None:
    """The first micro-batch that may take the item: an empty one always, and no other if it must open one."""
    for batch in batches:
        if not batch.names:
            return batch
        if opens or (limits.items is not None and len(batch.names) >= limits.items):
            continue
        if limits.tokens is None or batch.tokens + item.tokens <= limits.tokens:
            return batch
    return None


def _cost(batch: _Batch) -> float:
    return batch.cost


def _fullness(batch: _Batch) -> int:
    return -batch.tokens

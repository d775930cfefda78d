"""Items go to ranks and their micro-batches: longest first to the lightest rank (LPT), kept on a heap.

Invariant: every rank gets the same number of micro-batches, none over its limits unless its one item is, and
none empty while there are items enough. The result depends on the given order of items only, never on chance.
Torch-free; knows sizes and costs, nothing of samples, rollouts or steps.
"""

from __future__ import annotations

import heapq
import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

FIXED_SHARE = 0.1
"""Share of a micro-batch's time that does not shrink with it: gathering of weights, launches, reduction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a micro-batch may hold."""

    tokens: float = math.inf
    items: float = math.inf


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


_cost = operator.attrgetter("cost")


def _fullness(batch: _Batch) -> int:
    return -batch.tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class _Dealt:
    heaviest: float
    ranks: list[list[_Batch]]


def spread(items: Sequence[Item], *, ranks: int, group: int, limits: Limits) -> list[list[list[int]]]:
    """Names in micro-batches, [ranks][micro-batches][names]; counts are equal and a multiple of `group`.

    Each item goes, in the given order, to the lightest rank that has room. Given the most expensive first,
    this is LPT: without limits the heaviest rank is above the mean by (1 - 1/ranks) of the largest cost at
    most (Graham, SIAM J. Appl. Math. 17, 1969). The count is the smallest found; with a limit of tokens only,
    a larger one where room for better balance is worth more than the fixed work of more micro-batches.
    Micro-batches of a rank are ordered from the most expensive to the cheapest, so that ranks that run in
    lockstep meet like with like. Empty ones exist only if items are fewer than micro-batches; they come last.
    """
    count, dealt = _smallest(items, ranks, group, limits)
    if limits.items == math.inf:
        dealt = _better_balanced(dealt, items, ranks, count, group, limits)
    return [[batch.names for batch in sorted(rank, key=_cost, reverse=True)] for rank in dealt.ranks]


def imbalance(loads: Sequence[float]) -> float:
    """Largest load over the mean, less 1; 0 for no load at all."""
    total = sum(loads)
    return max(loads) * len(loads) / total - 1 if total else 0.0


def _smallest(items: Sequence[Item], ranks: int, group: int, limits: Limits) -> tuple[int, _Dealt]:
    """The smallest count for which all items find room: strides that double, then bisection."""
    fewest = _fewest(items, ranks, group, limits)
    count, failed, stride = fewest, fewest - group, group
    while (dealt := _loose_or_tight(items, ranks, count, limits)) is None:
        count, failed, stride = count + stride, count, 2 * stride
    while count - failed > group:
        middle = failed + (count - failed) // (2 * group) * group
        attempt = _loose_or_tight(items, ranks, middle, limits)
        if attempt is None:
            failed = middle
        else:
            count, dealt = middle, attempt
    return count, dealt


def _better_balanced(
    dealt: _Dealt, items: Sequence[Item], ranks: int, count: int, group: int, limits: Limits
) -> _Dealt:
    """More micro-batches, as long as the heaviest rank loses more than they cost and none is empty."""
    mean = sum(item.rank_cost for item in items) / ranks
    bound = max(mean, max((item.rank_cost for item in items), default=0))
    price = FIXED_SHARE * mean / count * group
    while dealt.heaviest - bound > price and (count + group) * ranks <= len(items):
        count += group
        more = _loose_or_tight(items, ranks, count, limits)
        if more is None or dealt.heaviest - more.heaviest <= price:
            break
        dealt = more
    return dealt


def _fewest(items: Sequence[Item], ranks: int, group: int, limits: Limits) -> int:
    """A lower bound of the micro-batches of a rank. At most k - 1 items share one if each is over cap / k."""
    cap, tokens = limits.tokens, [item.tokens for item in items]
    over_half, over_third = (sum(k * size > cap for size in tokens) for k in (2, 3))
    filled = math.ceil(sum(min(size, cap) for size in tokens) / cap)
    batches = max(1, math.ceil(len(items) / limits.items), filled, over_half, math.ceil(over_third / 2))
    return math.ceil(batches / (ranks * group)) * group


def _loose_or_tight(items: Sequence[Item], ranks: int, count: int, limits: Limits) -> _Dealt | None:
    """Balanced micro-batches if all find room that way, else those that are packed best."""
    loose = _place(items, ranks, count, limits, tight=False)
    return _place(items, ranks, count, limits, tight=True) if loose is None else loose


def _place(items: Sequence[Item], ranks: int, count: int, limits: Limits, *, tight: bool) -> _Dealt | None:
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
        while (batch := _room(placed[heap[0][1]], item, limits, left <= empty)) is None:
            passed.append(heapq.heappop(heap))
            if not heap:
                return None
        load, rank = heap[0]
        heapq.heapreplace(heap, (load + item.rank_cost, rank))
        for entry in passed:
            heapq.heappush(heap, entry)
        left -= 1
        empty -= not batch.names
        batch.names.append(item.name)
        batch.tokens += item.tokens
        batch.cost += item.batch_cost
        placed[rank].sort(key=preference)
    return _Dealt(heaviest=max(heap)[0], ranks=placed)


def _room(batches: Iterable[_Batch], item: Item, limits: Limits, opens: bool) -> _Batch | None:
    """The first micro-batch that may take the item: an empty one always, and no other if it must open one."""
    for batch in batches:
        if not batch.names:
            return batch
        if not opens and batch.tokens + item.tokens <= limits.tokens and len(batch.names) < limits.items:
            return batch
    return None

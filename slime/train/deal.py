"""Rows of a step go to the ranks that compute it, in equally many micro-batches.

Invariant: every row is in one micro-batch of one rank; the result depends on the rows only, so each rank
finds it alone. Rows that share a prefix stay together where that makes the slowest rank faster, and the
prefix counts once. Knows tokens and costs; knows no processes, models or losses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from slime.train.dp_schedule import DataParallelStep, build_dp_schedule
from slime.train.packing import MicroBatch, Packing, families, micro_batch, micro_batches, room_of
from slime.train.tree import PrefixForest, build_forest

Flops = Callable[[int], float]
_SHARES_OF_A_RANK = (1, 2, 4, 8, 16)
_GOOD_ENOUGH = 1.003


@dataclass(frozen=True, slots=True, kw_only=True)
class Dealing:
    """How rows are dealt.

    Attributes:
        ranks: number of ranks.
        packing: what a micro-batch may hold.
        flops: cost of a row by its length, for balance; None deals equal numbers of rows.
        even_batches: micro-batches of a rank are evened out by cost, otherwise by tokens.
    """

    ranks: int
    packing: Packing
    flops: Flops | None = None
    even_batches: bool = True


@dataclass(frozen=True, slots=True)
class _Unit:
    """Rows that stay together: their number of computed tokens, and what these cost."""

    rows: tuple[int, ...]
    tokens: int
    cost: float


def deal_rows(rows: Sequence[tuple[int, ...]], dealing: Dealing) -> list[list[MicroBatch]]:
    """Micro-batches of row indices by rank; the last ones of a rank may be empty.

    Smaller families of rows balance better, larger ones compute less: of several sizes, the one whose
    slowest rank has the least to do is taken. One rank packs as it would alone.
    """
    if dealing.ranks == 1 or not rows:
        return [micro_batches(rows, dealing.packing) for _ in range(dealing.ranks)]
    room, shared = room_of(rows, dealing.packing)
    forest = build_forest(rows, share=shared)
    flops = dealing.flops or float
    bound = _GOOD_ENOUGH * sum(_segment_cost(forest, k, flops) for k in range(len(forest.segments)))
    best: tuple[float, list[list[list[int]]]] | None = None
    for units in _candidates(rows, forest, dealing, room if shared else None):
        step = _schedule(units, dealing, room)
        slowest = max(sum(batch.cost for batch in rank) for rank in step.ranks)
        if best is None or slowest < best[0]:
            best = slowest, _rows_of(step, units)
        if slowest * dealing.ranks <= bound:
            break
    assert best is not None
    return [
        [micro_batch(chosen, rows, dealing.packing, room if shared else None) for chosen in rank]
        for rank in best[1]
    ]


def _candidates(
    rows: Sequence[tuple[int, ...]], forest: PrefixForest, dealing: Dealing, room: int | None
) -> Iterator[list[_Unit]]:
    """Units from families as large as may be to single rows; without `room` for families, rows at once."""
    flops = dealing.flops or float
    if room is not None and dealing.flops is not None:
        fair = forest.tokens / dealing.ranks
        sizes = {min(room, int(fair / share)) for share in _SHARES_OF_A_RANK}
        for size in sorted(sizes, reverse=True):
            yield [
                _Unit(
                    family.rows,
                    family.tokens,
                    sum(_segment_cost(forest, segment, flops) for segment in family.segments),
                )
                for family in families(forest, size)
            ]
    yield [_Unit((index,), len(row), flops(len(row))) for index, row in enumerate(rows)]


def _schedule(units: Sequence[_Unit], dealing: Dealing, room: int | None) -> DataParallelStep:
    balance = dealing.flops is not None
    (step,) = build_dp_schedule(
        rollout_ids=range(len(units)),
        total_lengths=[unit.tokens for unit in units],
        costs=[unit.cost for unit in units],
        dp_size=dealing.ranks,
        global_batch_size=len(units),
        micro_batch_size=dealing.packing.rows_per_batch,
        use_dynamic_batch_size=room is not None,
        max_tokens_per_gpu=room,
        balance_data=balance,
        balance_by_flops=balance and dealing.even_batches,
    ).steps
    return step


def _rows_of(step: DataParallelStep, units: Sequence[_Unit]) -> list[list[list[int]]]:
    return [
        [[row for unit in batch.samples for row in units[unit].rows] for batch in rank] for rank in step.ranks
    ]


def _segment_cost(forest: PrefixForest, index: int, flops: Flops) -> float:
    segment = forest.segments[index]
    stop = segment.start + len(segment.tokens)
    return flops(stop) - (flops(segment.start) if segment.start else 0)

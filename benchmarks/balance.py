"""Balance of FLOPs over data-parallel ranks: ours against the two usual ways, by imbalance and time.

    python benchmarks/balance.py [draws] [samples] [ranks]

A row: lengths, method, mean and largest imbalance (heaviest rank over the mean, less 1) over the draws, the
largest excess over the lower bound max(mean, largest sample), median milliseconds, micro-batches a rank.
Costs are those of an 8B decoder. "dealt in turn": sample k to rank k mod ranks. "Karmarkar-Karp": largest
differencing, equal numbers of samples. "first-fit": bins of the cap, dealt in turn. The first three methods
know no cap; "whole schedule" is `build_dp_schedule` with checks, costs, packing and reports.
"""

import heapq
import random
import statistics
import sys
import time
from collections import defaultdict

from slime.train.balance import Item, Limits, imbalance, spread
from slime.train.dp_schedule import build_dp_schedule
from slime.train.flops import ModelShape

CAP = 32768
FLOPS = ModelShape(
    layers=36, hidden=4096, heads=32, kv_heads=8, head_dim=128, ffn=12288, vocabulary=151936
).sample_flops()
LENGTHS = {
    "log-normal, to 16k": lambda draw: min(16384, 64 + int(draw.lognormvariate(8, 1))),
    "log-normal, to 32k": lambda draw: min(32768, 64 + int(draw.lognormvariate(8.5, 1))),
    "uniform 256 to 16k": lambda draw: draw.randint(256, 16384),
    "uniform 7k to 8k": lambda draw: draw.randint(7000, 8000),
    "90 % 1k to 4k, 10 % 24k to 32k": lambda draw: (
        draw.randint(1000, 4000) if draw.random() < 0.9 else draw.randint(24000, 32000)
    ),
}


def dealt_in_turn(lengths, costs, ranks):
    return [range(rank, len(costs), ranks) for rank in range(ranks)], 1


def karmarkar_karp(lengths, costs, ranks):
    """Largest differencing method; each part gets one sample of every `ranks`, so the counts are equal."""
    order = sorted(range(len(costs)), key=costs.__getitem__)
    heap = []
    for start in range(0, len(order), ranks):
        parts = [(costs[k], [k]) for k in reversed(order[start : start + ranks])]
        parts += [(0, [])] * (ranks - len(parts))
        heapq.heappush(heap, (parts[-1][0] - parts[0][0], start, parts))
    serial = len(order)
    while len(heap) > 1:
        (_, _, left), (_, _, right) = heapq.heappop(heap), heapq.heappop(heap)
        merged = [(a + b, x + y) for (a, x), (b, y) in zip(left, reversed(right), strict=True)]
        merged.sort(key=lambda part: -part[0])
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], serial, merged))
        serial += 1
    return [names for _, names in heap[0][2]], 1


def first_fit_dealt_in_turn(lengths, costs, ranks):
    """Bins of at most the cap, the heaviest halved until their number is a multiple of the ranks."""
    bins, rooms = [], []
    for k, length in enumerate(lengths):
        place = next((at for at, room in enumerate(rooms) if room >= length), len(bins))
        if place == len(bins):
            bins.append([])
            rooms.append(CAP)
        bins[place].append(k)
        rooms[place] -= length
    while len(bins) % ranks:
        heaviest = max(
            (found for found in bins if len(found) > 1), key=lambda found: sum(lengths[k] for k in found)
        )
        bins.remove(heaviest)
        by_length = sorted(heaviest, key=lambda k: -lengths[k])
        bins += [by_length[::2], by_length[1::2]]
    return [[k for found in bins[rank::ranks] for k in found] for rank in range(ranks)], len(bins) // ranks


def longest_first(lengths, costs, ranks):
    order = sorted(range(len(costs)), key=costs.__getitem__, reverse=True)
    items = [Item(k, lengths[k], costs[k], costs[k]) for k in order]
    return [rank[0] for rank in spread(items, ranks=ranks, group=1, limits=Limits())], 1


def schedule(lengths, costs, ranks):
    built = build_dp_schedule(
        rollout_ids=range(len(lengths)),
        total_lengths=lengths,
        dp_size=ranks,
        global_batch_size=len(lengths),
        use_dynamic_batch_size=True,
        max_tokens_per_gpu=CAP,
        flops=FLOPS,
        balance_by_flops=True,
    )
    (step,) = built.steps
    return [[k for batch in rank for k in batch.samples] for rank in step.ranks], step.num_microbatches


METHODS = {
    "dealt in turn": dealt_in_turn,
    "Karmarkar-Karp, equal numbers": karmarkar_karp,
    "ours, no cap": longest_first,
    "first-fit to 32k, dealt in turn": first_fit_dealt_in_turn,
    "ours, 32k cap, whole schedule": schedule,
}


def measure(method, draws, samples, ranks, length_of):
    found = defaultdict(list)
    for seed in range(draws):
        draw = random.Random(seed)
        lengths = [length_of(draw) for _ in range(samples)]
        costs = [FLOPS(length) for length in lengths]
        start = time.perf_counter()
        dealt, count = method(lengths, costs, ranks)
        found["ms"].append(1e3 * (time.perf_counter() - start))
        loads = [sum(costs[k] for k in rank) for rank in dealt]
        found["imbalance"].append(100 * imbalance(loads))
        found["excess"].append(100 * (max(loads) / max(sum(costs) / ranks, max(costs)) - 1))
        found["count"].append(count)
    return found


def main():
    draws, samples, ranks = (int(given) for given in [*sys.argv[1:], *(20, 1024, 32)[len(sys.argv) - 1 :]])
    print(f"{samples} samples, {ranks} ranks, {draws} draws")
    print(f"{'lengths':31}{'method':33}{'mean %':>8}{'max %':>8}{'excess':>8}{'ms':>7}{'count':>7}")
    for name, length_of in LENGTHS.items():
        for method, function in METHODS.items():
            found = measure(function, draws, samples, ranks, length_of)
            mean, worst = statistics.mean(found["imbalance"]), max(found["imbalance"])
            print(
                f"{name:31}{method:33}{mean:8.3f}{worst:8.3f}{max(found['excess']):8.3f}"
                f"{statistics.median(found['ms']):7.2f}{statistics.mean(found['count']):7.1f}"
            )


if __name__ == "__main__":
    main()

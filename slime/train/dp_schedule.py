"""Which samples each data-parallel rank computes, in which optimizer step and micro-batch.

Invariant: every sample is in exactly one micro-batch, or its rollout is carried over and named. A rollout is
whole in one step; ranks have equal numbers of micro-batches; none is over the token cap unless its one sample
is. Who computes what depends on ids, lengths and costs, never on the order of the input.
Torch-free; knows lengths, nothing of tokens, models or processes.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypedDict, get_args

from slime.errors import ConfigError, DataError
from slime.train.balance import Item, Limits, imbalance, spread

Incomplete = Literal["train", "carry"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Samples of one forward and backward pass on one rank.

    Attributes:
        samples: positions in the input; none where a step has fewer samples than micro-batches, in which
            case the rank passes with weight zero so that ranks stay in step.
        tokens: their total length.
        cost: their total FLOPs, or tokens where no `flops` was given.
    """

    samples: tuple[int, ...]
    tokens: int
    cost: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DataParallelStep:
    """One optimizer step: its rollouts, and [ranks][micro-batches], the expensive ones first on each rank."""

    rollout_ids: tuple[int, ...]
    ranks: tuple[tuple[MicroBatch, ...], ...]

    @property
    def num_microbatches(self) -> int:
        """Micro-batches of each rank."""
        return len(self.ranks[0])

    @property
    def imbalance(self) -> float:
        """Cost of the most expensive rank over the mean, less 1."""
        return imbalance([sum(batch.cost for batch in rank) for rank in self.ranks])

    @property
    def empty_microbatches(self) -> int:
        """Micro-batches without a sample, over all ranks."""
        return sum(not batch.samples for rank in self.ranks for batch in rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class OversizedSample:
    """A sample over the token cap: alone in its micro-batch, which may need more memory than planned."""

    sample: int
    rollout_id: int
    tokens: int
    cap: int


class RankData(TypedDict):
    """What one rank is given, next to its slice of the training data.

    `partition` holds input positions in the order of computation; `micro_batch_indices` has one list a
    micro-batch, of positions within `partition`, over all steps; the other two have one number a step:
    rollouts, and micro-batches of each rank.
    """

    partition: list[int]
    global_batch_sizes: list[int]
    num_microbatches: list[int]
    micro_batch_indices: list[list[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class DataParallelSchedule:
    """All steps of one batch of rollouts, and what is not in them.

    Attributes:
        carried: positions of the samples that wait for the next batch, whole rollouts.
        carried_rollout_ids: the rollouts of these.
        oversized: samples of the steps that are over the cap.
    """

    dp_size: int
    steps: tuple[DataParallelStep, ...]
    carried: tuple[int, ...]
    carried_rollout_ids: tuple[int, ...]
    oversized: tuple[OversizedSample, ...]

    def rank_data(self, rank: int) -> RankData:
        """The schedule of `rank` as keys of its training data."""
        batches = [batch.samples for step in self.steps for batch in step.ranks[rank]]
        positions = iter(range(sum(map(len, batches))))
        return RankData(
            partition=[sample for samples in batches for sample in samples],
            global_batch_sizes=[len(step.rollout_ids) for step in self.steps],
            num_microbatches=[step.num_microbatches for step in self.steps],
            micro_batch_indices=[[next(positions) for _ in samples] for samples in batches],
        )


def build_dp_schedule(
    *,
    rollout_ids: Sequence[int],
    total_lengths: Sequence[int],
    dp_size: int,
    global_batch_size: int,
    cp_size: int = 1,
    micro_batch_size: int = 1,
    use_dynamic_batch_size: bool = False,
    max_tokens_per_gpu: int | None = None,
    microbatch_group_size_per_vp_stage: int | None = None,
    balance_data: bool = True,
    balance_by_flops: bool = False,
    flops: Callable[[int], float] | None = None,
    costs: Sequence[float] | None = None,
    incomplete: Incomplete = "train",
) -> DataParallelSchedule:
    """Steps of `global_batch_size` rollouts by ascending id, each dealt to `dp_size` ranks.

    Args:
        rollout_ids, total_lengths: one a sample; siblings share their id; lengths in tokens.
        cp_size: ranks over which a sequence is spread; the cap is `max_tokens_per_gpu` x `cp_size`.
        micro_batch_size: most samples in a micro-batch, unless `use_dynamic_batch_size`.
        max_tokens_per_gpu: cap, for either kind of micro-batch; dynamic ones need it.
        microbatch_group_size_per_vp_stage: the number of micro-batches is a multiple of it.
        balance_data: ranks get equal cost; otherwise equal numbers of samples, by rollout id.
        balance_by_flops: micro-batches of a rank are evened out by cost, otherwise by tokens.
        flops: cost of a sample by its length, e.g. `flops.ModelShape.sample_flops()`; None: its tokens.
        costs: one a sample, where its length does not tell its cost, instead of `flops`.
        incomplete: what becomes of a last step with too few rollouts: ``train`` makes a step of them, whose
            `global_batch_sizes` entry is their own number; ``carry`` returns them as `carried`.

    Raises:
        ConfigError: a size below one; dynamic micro-batches without cap; `balance_by_flops` without `flops`
            or `costs`; `incomplete` unknown; a cost that is not positive and finite.
        DataError: ids, lengths and costs differ in number; a length below one.
    """
    _check_sizes(dp_size=dp_size, global_batch_size=global_batch_size, cp_size=cp_size)
    _check_sizes(micro_batch_size=micro_batch_size, max_tokens_per_gpu=max_tokens_per_gpu)
    _check_sizes(microbatch_group_size_per_vp_stage=microbatch_group_size_per_vp_stage)
    knows_costs = flops is not None or costs is not None
    _check_choices(use_dynamic_batch_size, max_tokens_per_gpu, balance_by_flops, knows_costs, incomplete)
    cap = math.inf if max_tokens_per_gpu is None else max_tokens_per_gpu * cp_size
    batch = _Batch(
        rollout_ids=rollout_ids,
        lengths=total_lengths,
        costs=_costs(rollout_ids, total_lengths, flops, costs),
        dp_size=dp_size,
        group=microbatch_group_size_per_vp_stage or 1,
        balance_data=balance_data,
        balance_by_flops=balance_by_flops,
        limits=Limits(tokens=cap, items=math.inf if use_dynamic_batch_size else micro_batch_size),
    )
    return batch.schedule(global_batch_size, incomplete)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Batch:
    """The samples, and by what they are ordered, weighed and limited."""

    rollout_ids: Sequence[int]
    lengths: Sequence[int]
    costs: Sequence[float]
    dp_size: int
    group: int
    balance_data: bool
    balance_by_flops: bool
    limits: Limits

    def schedule(self, global_batch_size: int, incomplete: Incomplete) -> DataParallelSchedule:
        """All rollouts in steps, but for those that are carried."""
        members: dict[int, list[int]] = defaultdict(list)
        for sample, rollout in enumerate(self.rollout_ids):
            members[rollout].append(sample)
        ids = sorted(members)
        kept = len(ids) if incomplete == "train" else len(ids) - len(ids) % global_batch_size
        steps = [ids[start : start + global_batch_size] for start in range(0, kept, global_batch_size)]
        return DataParallelSchedule(
            dp_size=self.dp_size,
            steps=tuple(self.step({rollout: members[rollout] for rollout in step}) for step in steps),
            carried=tuple(sample for rollout in ids[kept:] for sample in members[rollout]),
            carried_rollout_ids=tuple(ids[kept:]),
            oversized=self.oversized(sample for rollout in ids[:kept] for sample in members[rollout]),
        )

    def step(self, members: Mapping[int, Sequence[int]]) -> DataParallelStep:
        """The rollouts of `members` as one step."""
        samples = sorted((sample for found in members.values() for sample in found), key=self._order)
        rank_cost = self.costs if self.balance_data else [1] * len(self.costs)
        batch_cost = self.costs if self.balance_by_flops else self.lengths
        items = [
            Item(sample, self.lengths[sample], rank_cost[sample], batch_cost[sample]) for sample in samples
        ]
        dealt = spread(items, ranks=self.dp_size, group=self.group, limits=self.limits)
        return DataParallelStep(
            rollout_ids=tuple(members),
            ranks=tuple(tuple(self._micro_batch(names) for names in rank) for rank in dealt),
        )

    def oversized(self, samples: Iterable[int]) -> tuple[OversizedSample, ...]:
        """Those of `samples` that are longer than the cap."""
        cap = self.limits.tokens
        return tuple(
            OversizedSample(
                sample=sample, rollout_id=self.rollout_ids[sample], tokens=self.lengths[sample], cap=int(cap)
            )
            for sample in samples
            if self.lengths[sample] > cap
        )

    def _order(self, sample: int) -> tuple[float, ...]:
        """Most expensive first, or by rollout; equal for samples only if they cannot be told apart."""
        cost, length, rollout = -self.costs[sample], -self.lengths[sample], self.rollout_ids[sample]
        return (cost, length, rollout) if self.balance_data else (rollout, cost, length)

    def _micro_batch(self, samples: Sequence[int]) -> MicroBatch:
        return MicroBatch(
            samples=tuple(samples),
            tokens=sum(self.lengths[sample] for sample in samples),
            cost=sum(self.costs[sample] for sample in samples),
        )


def _costs(
    rollout_ids: Sequence[int],
    lengths: Sequence[int],
    flops: Callable[[int], float] | None,
    given: Sequence[float] | None,
) -> Sequence[float]:
    """Cost of every sample, after a check of ids and lengths."""
    for name, values in (("total_lengths", lengths), ("costs", given)):
        if values is not None and len(values) != len(rollout_ids):
            raise DataError(
                f"{len(rollout_ids)} rollout_ids for {len(values)} {name}",
                place="build_dp_schedule",
                remedy="give one of each for every sample",
            )
    for rollout, length in zip(rollout_ids, lengths, strict=True):
        if length < 1:
            raise DataError(
                f"a sample has total length {length}",
                place=f"rollout {rollout}",
                remedy="leave out samples without tokens, with a reason",
            )
    costs = given or lengths if flops is None else [flops(length) for length in lengths]
    for cost, length in zip(costs, lengths, strict=True):
        if not 0 < cost < math.inf:
            source = "costs" if flops is None else "flops"
            raise ConfigError(
                f"{source}({length}) is {cost}",
                place=source,
                remedy="give a positive, finite number for every length",
            )
    return costs


def _check_sizes(**sizes: int | None) -> None:
    for name, size in sizes.items():
        if size is not None and size < 1:
            raise ConfigError(f"{name} is {size}", place=name, remedy="give 1 or more")


def _check_choices(
    dynamic: bool,
    max_tokens: int | None,
    by_flops: bool,
    knows_costs: bool,
    incomplete: str,
) -> None:
    if dynamic and max_tokens is None:
        raise ConfigError(
            "dynamic micro-batches have no token cap",
            place="--use-dynamic-batch-size",
            remedy="set --max-tokens-per-gpu",
        )
    if by_flops and not knows_costs:
        raise ConfigError(
            "balance by FLOPs, but the cost of a sample is not known",
            place="--balance-by-flops",
            remedy="pass `flops`, e.g. slime.train.flops.shape_of_config(config).sample_flops()",
        )
    if incomplete not in get_args(Incomplete):
        raise ConfigError(
            f"incomplete is {incomplete!r}", place="incomplete", remedy="give 'train' or 'carry'"
        )

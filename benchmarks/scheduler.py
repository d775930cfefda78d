"""The scheduler against the rules of other frameworks, in virtual time, on the same durations.

    python benchmarks/scheduler.py [--out results.json]      # about a minute, no engine, no GPU

A step trains 16 groups of 8 rollouts and takes 8 s; 512 rollouts run at once. Durations are lognormal (median
8 s, sigma 1) or Pareto (least 3 s, alpha 1.5). slime's rows are its real scheduler and policies
(`slime.rollout.simulation`); the count and drop rules of others are played by `Play` below. Rollout number n
takes equally long under every rule. Checked, not only told: slime trains nothing older than K, drops nothing,
trains no group twice, and both simulators agree where no rule is at work.
"""

import argparse
import concurrent.futures
import heapq
import json
import math
import multiprocessing
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from slime.rollout.accounting import KEPT, Account, Fate
from slime.rollout.fully_async_rollout import LATE_PERCENTILE
from slime.rollout.policy import FullyAsynchronous, Policy, Synchronous
from slime.rollout.scheduling import Limits
from slime.rollout.simulation import TOKENS_PER_SECOND, Outcomes, Setting, simulate

GROUPS, SIZE, SLOTS, TRAIN_SECONDS = 16, 8, 512, 8.0
BOUNDS = (1, 2, 4, 8)
AIM = 0.8
DURATIONS: dict[str, Callable[[random.Random], float]] = {
    "lognormal": lambda rng: rng.lognormvariate(math.log(8.0), 1.0),
    "pareto": lambda rng: 3.0 * rng.paretovariate(1.5),
}
UNBOUNDED = "slime, unbounded"
CROSS_CHECK = "first finished, unbounded"
COLUMNS = (
    f"{'rule':34} {'K':>2} {'rollouts/s':>10} {'of unbounded':>12} {'trainer idle':>12} {'oldest':>6} "
    f"{'mean age':>8} {'dropped':>7} {'cut':>6} {'wasted':>6} {'length':>6}"
)


@dataclass(frozen=True, kw_only=True)
class Size:
    """Rollouts that run at once, seconds of a step's training, and steps to play."""

    slots: int
    train_seconds: float
    steps: int


@dataclass(kw_only=True)
class Row:
    """What came of a rule.

    Attributes:
        oldest, mean_age: of the oldest token of a trained group, in weight updates.
        dropped: share of the finished or cancelled rollouts that never train.
        cut: share of the trained rollouts that were ended early, and count as truncated.
        wasted: share of the rollout seconds whose tokens never train.
        length: mean length of the trained rollouts over the mean that was drawn; below 1, short ones win.
    """

    durations: str
    rule: str
    bound: int | None
    rate: float
    idle: float
    oldest: int
    mean_age: float
    dropped: float = 0.0
    cut: float = 0.0
    wasted: float = 0.0
    length: float = 1.0
    share: float = 1.0

    def line(self) -> str:
        """The row for a person."""
        bound = "-" if self.bound is None else str(self.bound)
        return (
            f"{self.rule:34} {bound:>2} {self.rate:10.2f} {self.share:12.0%} {self.idle:12.0%} "
            f"{self.oldest:6d} {self.mean_age:8.2f} {self.dropped:7.1%} {self.cut:6.1%} {self.wasted:6.1%} "
            f"{self.length:6.3f}"
        )


class Trace:
    """Durations in the order in which rollouts are drawn, the same for every rule."""

    def __init__(self, durations: str, seed: int) -> None:
        self._rng, self._draw = random.Random(seed), DURATIONS[durations]
        self.drawn: list[float] = []

    def __call__(self) -> float:
        """The next rollout's seconds."""
        self.drawn.append(self._draw(self._rng))
        return self.drawn[-1]

    def length(self, seconds: float, rollouts: int) -> float:
        """Mean of the trained over the mean of all that were drawn."""
        return seconds / rollouts / statistics.fmean(self.drawn)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One rule of slime's own scheduler.

    Attributes:
        late: percentile past which a group that holds up a batch is cut; 1.0 cuts none.
        ahead: collect the next batch while one trains.
        bounded: K is a promise, which is checked.
    """

    rule: str
    policy: Callable[[int], Policy]
    bound: int | None = None
    late: float = 1.0
    ahead: bool = True

    def play(self, durations: str, size: Size, seed: int) -> Row:
        """Run it to the end and check what it promises."""
        trace = Trace(durations, seed)
        policy = self.policy(size.slots // SIZE)
        found = simulate(
            Setting(
                policy=policy,
                limits=Limits(
                    wanted=GROUPS, group_size=SIZE, max_staleness=self.bound, late_percentile=self.late
                ),
                slots=size.slots,
                draw=trace,
                steps=size.steps,
                ahead=self.ahead,
                train_seconds=size.train_seconds,
            )
        )
        self._check(found, size)
        tokens, trained = found.account.lengths[Fate.TRAINED]
        return Row(
            durations=durations,
            rule=self.rule,
            bound=self.bound,
            rate=found.trained_per_second,
            idle=found.idle,
            oldest=found.oldest,
            mean_age=found.mean_age,
            cut=found.cut / trained,
            wasted=_wasted(found.account, policy.continuous),
            length=trace.length(tokens / TOKENS_PER_SECOND, trained),
        )

    def _check(self, found: Outcomes, size: Size) -> None:
        account = found.account
        assert self.bound is None or found.oldest <= self.bound, (self.rule, self.bound, found.oldest)
        assert account.total(Fate.FILTERED) == account.total(Fate.FAILED) == 0, account.line()
        assert account.total(Fate.TRAINED) == size.steps * GROUPS * SIZE, account.line()
        groups = [group for step in found.groups for group in step]
        assert len(groups) == len(set(groups)), f"{self.rule} trained a group twice"


def _wasted(account: Account, continuous: bool) -> float:
    """Share of the rollout seconds that came to nothing. What a continuous policy has in flight when the play
    ends goes back too; that is the play's end, not the rule's doing."""
    whole = sum(account.seconds.values())
    kept = (Fate.TRAINED, Fate.REQUEUED) if continuous else (Fate.TRAINED,)
    lost = sum(s for (fate, why), s in account.seconds.items() if fate not in kept and why not in KEPT)
    return lost / whole


def unbounded(most: int) -> Policy:
    """Fully asynchronous."""
    return FullyAsynchronous(most)


OURS = [
    *(Case(rule="slime", policy=unbounded, bound=k, late=LATE_PERCENTILE) for k in BOUNDS),
    *(Case(rule="slime, no cuts", policy=unbounded, bound=k) for k in BOUNDS),
    Case(rule=UNBOUNDED, policy=unbounded),
    Case(rule="synchronous", policy=lambda most: Synchronous(GROUPS), ahead=False),
    Case(rule="one step off", policy=lambda most: Synchronous(GROUPS)),
    Case(
        rule="partial, 2x over-sampling",
        policy=lambda most: Synchronous(2 * GROUPS, partial=True),
        ahead=False,
    ),
]
"""The last three are known rules that slime's `Synchronous` policy is: rollout and training take turns; the
next batch is generated while one trains, and all of it is waited for; twice the groups start, and what the
closing batch interrupts is continued later with its tokens (as in APRIL, arXiv:2509.18521)."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A peer's rule. A batch never waits for a group that runs: it takes finished ones, oldest weights first.

    Attributes:
        counts: bound the groups that are out by count: (version + K + 1) * batch ever admitted, less those
            that were discarded. This is section 5.1 of arXiv:2505.24298 (AReaL) and the documented
            `sampling_steps_ahead` of the Tinker cookbook. Otherwise groups start as slots become free, as
            long as no more than one batch waits beside full slots.
        drops: when a batch is formed, discard finished groups that are older than K; others are drawn.
        cancels: on each new version, cancel running groups that are older than K, and draw others.
    """

    rule: str
    bound: int | None
    counts: bool = False
    drops: bool = False
    cancels: bool = False

    def play(self, durations: str, size: Size, seed: int) -> Row:
        """Run it to the end."""
        return Play(self, Trace(durations, seed), size).run(durations)


@dataclass(order=True)
class Group:
    """A prompt's rollouts; sorts by `end`."""

    end: float
    number: int
    version: int = field(compare=False)
    started: float = field(compare=False)
    seconds: list[float] = field(compare=False)

    def spent(self, now: float) -> float:
        """Rollout seconds until `now`."""
        return sum(min(seconds, now - self.started) for seconds in self.seconds)


class Play:
    """A rule in virtual time, by groups. Needs no queue for slots: no more groups run than have slots."""

    def __init__(self, rule: Rule, trace: Trace, size: Size) -> None:
        self.rule, self.trace, self.size = rule, trace, size
        self.now, self.version, self.taken, self.started = 0.0, 0, 0, 0
        self.running: list[Group] = []
        self.finished: list[Group] = []
        self.trained: list[Group] = []
        self.ages: list[int] = []
        self.idle = self.lost = 0.0
        self.dropped = 0

    def run(self, durations: str) -> Row:
        """Play all steps."""
        for _ in range(self.size.steps):
            waited = self.now
            self._until(self._has_batch)
            self.idle += self.now - waited
            end = self.now + self.size.train_seconds
            self._until(self._ends_after(end))
            self.now, self.version = end, self.version + 1
            if self.rule.cancels:
                self._cancel()
        return self._row(durations)

    def _until(self, holds: Callable[[], bool]) -> None:
        """Let groups finish one after the other, and others start, until it holds."""
        while True:
            self._admit()
            if holds():
                return
            group = heapq.heappop(self.running)
            self.now = group.end
            self.finished.append(group)

    def _ends_after(self, end: float) -> Callable[[], bool]:
        """Whether nothing more finishes until `end`."""
        return lambda: not self.running or self.running[0].end > end

    def _has_batch(self) -> bool:
        """Take a batch if there is one."""
        if self.rule.drops:
            self._discard([group for group in self.finished if self._is_old(group)])
            self._admit()
        if len(self.finished) < GROUPS:
            return False
        self.finished.sort(key=lambda group: (group.version, group.end))
        batch, self.finished = self.finished[:GROUPS], self.finished[GROUPS:]
        self.trained += batch
        self.ages += [self.version - group.version for group in batch]
        self.taken += GROUPS
        return True

    def _admit(self) -> None:
        free = self.size.slots // SIZE - len(self.running)
        out = len(self.running) + len(self.finished)
        room = free
        if self.rule.bound is not None:
            most = self.size.slots // SIZE + GROUPS
            if self.rule.counts:
                most = (self.version + self.rule.bound + 1) * GROUPS - self.taken
            room = min(free, most - out)
        for _ in range(room):
            seconds = [self.trace() for _ in range(SIZE)]
            end = self.now + max(seconds)
            heapq.heappush(self.running, Group(end, self.started, self.version, self.now, seconds))
            self.started += 1

    def _is_old(self, group: Group) -> bool:
        return self.rule.bound is not None and self.version - group.version > self.rule.bound

    def _cancel(self) -> None:
        self._discard([group for group in (*self.running, *self.finished) if self._is_old(group)])

    def _discard(self, old: list[Group]) -> None:
        self.dropped += len(old)
        self.lost += sum(group.spent(self.now) for group in old)
        self.running = [group for group in self.running if group not in old]
        self.finished = [group for group in self.finished if group not in old]
        heapq.heapify(self.running)

    def _row(self, durations: str) -> Row:
        seconds = sum(sum(group.seconds) for group in self.trained)
        rollouts = len(self.trained) * SIZE
        return Row(
            durations=durations,
            rule=self.rule.rule,
            bound=self.rule.bound,
            rate=rollouts / self.now,
            idle=self.idle / self.now,
            oldest=max(self.ages),
            mean_age=statistics.fmean(self.ages),
            dropped=self.dropped / (self.dropped + len(self.trained)),
            wasted=self.lost / (self.lost + seconds),
            length=self.trace.length(seconds, rollouts),
        )


PEERS = [
    *(Rule(rule="count (AReaL, Tinker)", bound=k, counts=True) for k in BOUNDS),
    *(Rule(rule="count, drops what is older", bound=k, counts=True, drops=True) for k in BOUNDS),
    *(Rule(rule="drops what is older", bound=k, drops=True) for k in BOUNDS),
    *(Rule(rule="drops, cancels what runs", bound=k, drops=True, cancels=True) for k in BOUNDS),
    Rule(rule=CROSS_CHECK, bound=None),
]


def _play_all(size: Size, seed: int, processes: int) -> list[Row]:
    names = [(kind, place) for kind in DURATIONS for place in range(len(OURS) + len(PEERS))]
    with concurrent.futures.ProcessPoolExecutor(processes, multiprocessing.get_context("fork")) as pool:
        jobs = [pool.submit(_by_name, kind, place, size, seed) for kind, place in names]
        return [job.result() for job in jobs]


def _by_name(durations: str, place: int, size: Size, seed: int) -> Row:
    cases: list[Case | Rule] = [*OURS, *PEERS]
    return cases[place].play(durations, size, seed)


def main() -> None:
    """Entry of the script."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--slots", type=int, default=SLOTS, help="rollouts that run at once [512]")
    parser.add_argument("--train-seconds", type=float, default=TRAIN_SECONDS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    size = Size(slots=options.slots, train_seconds=options.train_seconds, steps=options.steps)
    began = time.monotonic()
    rows = _play_all(size, options.seed, options.processes)
    for kind in DURATIONS:
        _report(kind, [row for row in rows if row.durations == kind])
    print(f"\n{len(rows)} plays of {size.steps} steps in {time.monotonic() - began:.0f} s")
    if options.out:
        options.out.write_text(json.dumps([asdict(row) for row in rows], indent=1))


def _report(kind: str, rows: list[Row]) -> None:
    free = next(row for row in rows if row.rule == UNBOUNDED)
    print(f"\n{kind}\n{COLUMNS}")
    for row in rows:
        row.share = row.rate / free.rate
        print(row.line())
    check = next(row for row in rows if row.rule == CROSS_CHECK)
    assert abs(check.share - 1) < 0.05, f"the two simulators differ: {check.share:.3f}"
    ours = next(row for row in rows if row.rule == "slime" and row.bound == 4)
    met = "met" if ours.share >= AIM else "MISSED"
    print(f"slime at K=4: {ours.share:.0%} of the unbounded throughput; the aim of {AIM:.0%} is {met}")


if __name__ == "__main__":
    main()

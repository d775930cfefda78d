"""`slime simulate`: play rollout durations through the real scheduler, to choose a policy before a run.

Durations come from a distribution, a histogram, or the events of a run. Needs neither torch nor an engine.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from slime.errors import ConfigError, DataError
from slime.observability.trackers import read_metrics
from slime.rollout import events
from slime.rollout.fully_async_rollout import LATE_PERCENTILE
from slime.rollout.policy import FullyAsynchronous, Policy, Synchronous
from slime.rollout.scheduling import Limits
from slime.rollout.simulation import Draw, Outcomes, Setting, simulate

POLICIES = ("synchronous", "partial", "ahead", "fully_async")
COLUMNS = ("policy", "K", "rollouts/s", "idle", "oldest", "mean age", "cut", "wasted", "length")
LEGEND = (
    "K: --max-staleness. idle: share of the time in which the trainer waits. oldest, mean age: of the oldest "
    "token of a group, in weight updates. cut: rollouts. length: mean of the trained over that of all ended"
)


def main(argv: list[str]) -> int:
    """Entry of the verb; returns the exit code."""
    options = _parser().parse_args(argv)
    make_draw = _durations(options.durations)
    train = _train_seconds(options)
    drawn = _sample(make_draw(options.seed))
    console = Console(highlight=False)
    console.print(
        f"rollouts take {statistics.fmean(drawn):.1f} s on average, {statistics.median(drawn):.1f} s in the "
        f"median, {drawn[int(0.99 * len(drawn))]:.1f} s in the 99th percentile; training {train:.1f} s"
    )
    table = Table(*COLUMNS, box=None)
    for policy in options.policies:
        for bound in options.max_staleness if policy == "fully_async" else (None,):
            table.add_row(
                *_cells(policy, bound, simulate(_setting(options, policy, bound, make_draw, train)))
            )
    console.print(table)
    console.print(LEGEND)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="slime simulate", description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "durations",
        help="lognormal:MEDIAN,SIGMA, pareto:LEAST,ALPHA, constant:SECONDS, a file of lines SECONDS[,COUNT], "
        "or the --run-dir of a run",
    )
    parser.add_argument("--policies", nargs="+", default=list(POLICIES), choices=POLICIES)
    parser.add_argument("--max-staleness", nargs="+", type=_positive, default=[1, 2, 4, 8], metavar="K")
    parser.add_argument("--rollout-batch-size", type=_positive, default=32, help="groups of a step [32]")
    parser.add_argument("--over-sampling-batch-size", type=_positive, help="groups in flight of a step")
    parser.add_argument("--n-samples-per-prompt", type=_positive, default=8, help="rollouts of a group [8]")
    parser.add_argument("--concurrency", type=_positive, default=512, help="rollouts that run at once [512]")
    parser.add_argument("--train-seconds", type=float, help="of a step (default: the run's, else 10)")
    parser.add_argument("--update-seconds", type=float, default=1.0, help="of a weight update [1]")
    parser.add_argument("--late-percentile", type=float, default=LATE_PERCENTILE)
    parser.add_argument("--steps", type=_positive, default=50, help="steps to play [50]")
    parser.add_argument("--seed", type=int, default=0)
    return parser


def _positive(word: str) -> int:
    value = int(word)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is below 1")
    return value


def _setting(
    options: argparse.Namespace,
    policy: str,
    bound: int | None,
    make_draw: Callable[[int], Draw],
    train: float,
) -> Setting:
    return Setting(
        policy=_policy(options, policy),
        limits=Limits(
            wanted=options.rollout_batch_size,
            group_size=options.n_samples_per_prompt,
            max_staleness=bound,
            late_percentile=options.late_percentile if bound is not None else 1.0,
        ),
        slots=options.concurrency,
        draw=make_draw(options.seed),
        steps=options.steps,
        ahead=policy in ("ahead", "fully_async"),
        train_seconds=train,
        update_seconds=options.update_seconds,
    )


def _policy(options: argparse.Namespace, policy: str) -> Policy:
    if policy == "fully_async":
        most = options.over_sampling_batch_size or math.ceil(
            options.concurrency / options.n_samples_per_prompt
        )
        return FullyAsynchronous(most)
    beside = 2 if policy == "partial" else 1
    outstanding = options.over_sampling_batch_size or beside * options.rollout_batch_size
    return Synchronous(outstanding, partial=policy == "partial")


def _cells(policy: str, bound: int | None, found: Outcomes) -> Sequence[str]:
    return (
        policy,
        "-" if bound is None else str(bound),
        f"{found.trained_per_second:.2f}",
        f"{found.idle:.0%}",
        str(found.oldest),
        f"{found.mean_age:.2f}",
        str(found.cut),
        f"{found.account.wasted_ratio:.1%}",
        f"{found.account.length_ratio:.3f}",
    )


def _durations(text: str) -> Callable[[int], Draw]:
    """A maker of draws, by seed.

    Raises:
        ConfigError: neither a distribution nor a run.
    """
    name, _, numbers = text.partition(":")
    if Path(text).is_dir():
        return _observed(Path(text) / events.NAME)
    if Path(text).is_file():
        return _binned(Path(text))
    try:
        values = [float(number) for number in numbers.split(",")]
        makers: dict[str, Callable[[random.Random], Draw]] = {
            "lognormal": lambda rng: lambda: rng.lognormvariate(math.log(values[0]), values[1]),
            "pareto": lambda rng: lambda: values[0] * rng.paretovariate(values[1]),
            "constant": lambda rng: lambda: values[0],
        }
        make = makers[name]
        make(random.Random(0))()
    except (KeyError, ValueError, IndexError, ZeroDivisionError) as error:
        raise ConfigError(
            f"{text!r} is no distribution, no file and no folder of a run",
            place="durations",
            remedy="e.g. lognormal:20,1.0 or pareto:5,1.5, or the --run-dir of a run",
        ) from error
    return lambda seed: make(random.Random(seed))


def _observed(log: Path) -> Callable[[int], Draw]:
    """Durations drawn again from those of a run."""
    seconds = [
        rollout["seconds"]
        for event in events.read_events(log)
        if event["event"] == "finish"
        for rollout in event["rollouts"]
        if rollout["seconds"] > 0
    ]
    if not seconds:
        raise DataError("no rollout has finished in it", place=str(log))
    return _drawn_from(seconds, [1.0] * len(seconds))


def _binned(path: Path) -> Callable[[int], Draw]:
    """Durations of a histogram.

    Raises:
        DataError: a line that is no bin.
    """
    seconds, counts = [], []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):
        if not line.strip():
            continue
        first, _, second = line.partition(",")
        try:
            seconds.append(float(first))
            counts.append(float(second or 1))
            if not (seconds[-1] > 0 and counts[-1] >= 0):
                raise ValueError("below zero")
        except ValueError as error:
            raise DataError(
                f"line {number} is {line!r}", place=str(path), remedy="write SECONDS or SECONDS,COUNT"
            ) from error
    if not sum(counts):
        raise DataError("holds no durations", place=str(path), remedy="write a line SECONDS,COUNT a bin")
    return _drawn_from(seconds, counts)


def _drawn_from(seconds: list[float], weights: list[float]) -> Callable[[int], Draw]:
    def make(seed: int) -> Draw:
        rng = random.Random(seed)
        return lambda: rng.choices(seconds, weights)[0]

    return make


def _sample(draw: Draw) -> list[float]:
    return sorted(draw() for _ in range(1000))


def _train_seconds(options: argparse.Namespace) -> float:
    if options.train_seconds is not None:
        return float(options.train_seconds)
    metrics = Path(options.durations) / "metrics.jsonl"
    rows = read_metrics(metrics) if metrics.is_file() else []
    seconds = [row["perf/train_time"] for row in rows if "perf/train_time" in row]
    return statistics.median(seconds) if seconds else 10.0

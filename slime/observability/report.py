"""The end of a run: what changed, and where everything is. One text, one picture.

Reads `metrics.jsonl` and nothing else of the run, so that it can be made again later.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slime.observability.console import ACCOUNTING, FATES
from slime.observability.trackers import is_number, read_metrics

REWARD = "rollout/raw_reward"


def evaluation_scores(rows: list[dict[str, Any]]) -> dict[str, list[tuple[int, float]]]:
    """Data set -> (steps done, mean reward) of each evaluation, in order."""
    scores: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        for name, value in row.items():
            dataset = name.removeprefix("eval/")
            if not name.startswith("eval/") or not is_number(value):
                continue
            if not re.search(r"/|-truncated_ratio$|-pass@\d+$", dataset):
                scores.setdefault(dataset, []).append((row["step"], value))
    return scores


def report_lines(run_dir: Path, places: Mapping[str, Path | None]) -> list[str]:
    """The report of a run as lines.

    Args:
        places: what -> where, e.g. ``{"checkpoint": Path(...)}``; None is left out.
    """
    rows = read_metrics(run_dir / "metrics.jsonl")
    lines = []
    for dataset, points in evaluation_scores(rows).items():
        (first, before), (last, after) = points[0], points[-1]
        change = f"{before:.3f} after {first} steps"
        if len(points) > 1:
            factor = f", {after / before:.1f} times as much" if before > 0 else ""
            change = f"{before:.3f} before, {after:.3f} after {last} steps{factor}"
        lines.append(f"accuracy on {dataset}: {change}")
    rewards = [row[REWARD] for row in rows if is_number(row.get(REWARD))]
    if rewards:
        lines.append(f"training reward: {rewards[0]:.3f} in the first step, {rewards[-1]:.3f} in the last")
    lines += accounting_lines(rows)
    here = {"metrics": run_dir / "metrics.jsonl", "reward curve": reward_curve(run_dir, rows), **places}
    lines += [f"{what + ':':<16}{path}" for what, path in here.items() if path is not None]
    return [*lines, f"{'look at it:':<16}{program()} view {run_dir}"]


def program() -> str:
    """How to call `slime` from here: by name, or by its path where its environment is not activated."""
    if shutil.which("slime"):
        return "slime"
    return os.path.relpath(Path(sys.executable).with_name("slime"))


def accounting_lines(rows: list[dict[str, Any]]) -> list[str]:
    """What became of all rollouts of the run, with reasons (law 5); nothing where none were made."""
    totals: Counter[str] = Counter()
    for row in rows:
        totals.update(
            {k.removeprefix(ACCOUNTING): int(v) for k, v in row.items() if k.startswith(ACCOUNTING)}
        )
    if not totals:
        return []
    steps = [row for row in rows if ACCOUNTING + "in_flight" in row]
    totals["in_flight"] = int(steps[-1][ACCOUNTING + "in_flight"])
    if stopped := sum(_not_carried(one, other) for one, other in itertools.pairwise(steps)):
        totals += Counter({"requeued": stopped, "requeued/the run stopped": stopped})
    fates = " + ".join(f"{totals[fate.replace(' ', '_')]} {fate}" for fate in FATES)
    reasons = [f"  {name.replace('/', ': ')}: {count}" for name, count in totals.items() if "/" in name]
    return [f"rollouts: {totals['submitted']} submitted = {fates}", *reasons]


def _not_carried(step: dict[str, Any], following: dict[str, Any]) -> int:
    """Rollouts in flight after a step that begin again after it: the run was stopped between the two."""
    return int(step[ACCOUNTING + "in_flight"] - following.get(ACCOUNTING + "carried", 0))


def reward_curve(run_dir: Path, rows: list[dict[str, Any]]) -> Path | None:
    """Draw training reward and evaluations over the steps to `reward.png`; None without a reward."""
    points = [(row["step"], row[REWARD]) for row in rows if is_number(row.get(REWARD))]
    if not points:
        return None
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label="training reward")
    for dataset, scores in evaluation_scores(rows).items():
        axes.plot(*zip(*scores, strict=True), marker="s", linestyle="--", label=f"{dataset} (evaluation)")
    axes.set_xlabel("rollout steps")
    axes.set_ylabel("mean reward")
    axes.grid(alpha=0.3)
    axes.legend()
    path = run_dir / "reward.png"
    figure.savefig(path, dpi=120)
    return path

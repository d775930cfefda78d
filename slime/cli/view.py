"""`slime view RUN`: a run on the terminal: its steps, and its rollouts token by token.

Reads `metrics.jsonl` and rollout dumps; needs neither torch nor a model.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from slime.errors import DataError
from slime.observability.console import COLUMNS, cells
from slime.observability.trackers import read_metrics
from slime.rollout.dump import load_file
from slime.utils.types import Sample


def main(argv: list[str]) -> int:
    """Entry of the verb; returns the exit code."""
    parser = argparse.ArgumentParser(prog="slime view", description=__doc__, allow_abbrev=False)
    parser.add_argument("run", type=Path, help="run folder, or one rollout dump (.jsonl)")
    parser.add_argument("--rollout", type=int, help="rollout step whose samples to show (default: the last)")
    parser.add_argument("--samples", type=int, default=8, help="how many samples to show [8]")
    options = parser.parse_args(argv)
    console = Console(highlight=False)
    if not options.run.exists():
        raise DataError(
            "is not there", place=str(options.run), remedy="name the --run-dir of a run, or a dump"
        )
    if options.run.is_dir():
        console.print(steps_table(options.run))
        dump = find_dump(options.run, options.rollout)
    else:
        dump = options.run
    if dump is not None:
        console.print(samples_table(load_file(dump)[: options.samples], dump.name))
    return 0


def steps_table(run: Path) -> Table:
    """The step table of a run.

    Raises:
        DataError: the folder holds no `metrics.jsonl`.
    """
    path = run / "metrics.jsonl"
    if not path.is_file():
        raise DataError("holds no metrics.jsonl", place=str(run), remedy="name the --run-dir of a run")
    table = Table(*(title for title, _, _ in COLUMNS), title=str(run))
    for row in read_metrics(path):
        if "rollout/raw_reward" in row:
            table.add_row(*cells(row["step"], row))
    return table


def find_dump(run: Path, rollout: int | None) -> Path | None:
    """The dump of a rollout step below ``<run>/rollouts``; the last one by default, None without dumps."""
    dumps = {int(path.stem): path for path in (run / "rollouts").glob("*.jsonl") if path.stem.isdigit()}
    if not dumps:
        return None
    if rollout is not None and rollout not in dumps:
        raise DataError(f"no dump of rollout step {rollout}", place=str(run / "rollouts"))
    return dumps[max(dumps) if rollout is None else rollout]


def samples_table(samples: list[Sample], title: str) -> Table:
    """Samples with prompt, response, label and reward."""
    table = Table(
        "group", "rollout", "prompt", "response", "label", "reward", "tokens", "status", title=title
    )
    for sample in samples:
        prompt = sample.prompt if isinstance(sample.prompt, str) else str(sample.prompt)
        table.add_row(
            str(sample.group_index),
            str(sample.rollout_id),
            Text(prompt[-120:]),
            Text(sample.response[:300]),
            Text(str(sample.label)),
            str(sample.reward),
            f"{sample.effective_response_length}/{sample.response_length}",
            sample.status.value,
        )
    return table

"""`slime rescore DUMP --rm-type TYPE --out FILE`: score stored rollouts again, and compare.

All reward flags are those of `slime train`. Invariant: the dump that is read stays as it is; the new one is
written whole or not at all. Needs neither a model nor torch.
"""

from __future__ import annotations

import asyncio
import dataclasses
import statistics
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

from rich.console import Console
from rich.table import Table

from slime.config.parse import parse_section
from slime.config.sections import RewardConfig
from slime.errors import ConfigError, DataError
from slime.rollout import dump
from slime.rollout.hooks import check_hooks
from slime.rollout.rescore import Rescored, Rescoring, rescore
from slime.rollout.rm_hub.builtin import check_rm_type
from slime.rollout.rm_hub.pool import close_shared_pools

_FURTHER = {
    "dump": "a rollout dump (.jsonl) of --save-debug-rollout-data",
    "--out": "where to write the rollouts with their new rewards (default: nowhere)",
    "--concurrency": "groups that are scored at once [32]",
    "--show": "changed rollouts to list [10]",
}
_MOST_VALUES = 8
"""A table of old against new rewards is shown up to so many different ones."""


def main(argv: list[str]) -> int:
    """Entry of the verb; returns 1 where no rollout could be scored.

    Raises:
        ConfigError: a flag is wrong, or ``--out`` names something that is there.
        DataError: the dump cannot be read.
    """
    config, rest = parse_section(RewardConfig, argv, "slime rescore", _FURTHER)
    source = Path(rest["dump"])
    out = Path(rest["out"]) if "out" in rest else None
    if out is not None and out.exists():
        raise ConfigError(f"{out} is there already", place="--out", remedy="name a new file")
    args = SimpleNamespace(**dataclasses.asdict(config))
    if config.rm_type and not config.custom_rm_path:
        check_rm_type(config.rm_type, "--rm-type")
    check_hooks(args)
    samples = dump.load_file(source)
    if not samples:
        raise DataError("holds no samples", place=str(source))
    try:
        result = asyncio.run(rescore(samples, args, concurrency=_count(rest, "concurrency", 32)))
    finally:
        close_shared_pools()
    if out is not None:
        dump.save(str(out), "", samples)
    show(result, Console(highlight=False), changed=_count(rest, "show", 10))
    scored = any(rollout.new is not None for rollout in result.rollouts)
    return int(not scored)


def show(result: Rescoring, console: Console, *, changed: int) -> None:
    """Print the comparison.

    Args:
        changed: how many changed rollouts to list at most.
    """
    console.print(summary(result))
    values = {value for row in result.compared for value in (row.old, row.new)}
    if 0 < len(values) <= _MOST_VALUES:
        console.print(_cross_table(result))
    different = [row for row in result.rollouts if not row.agrees][:changed]
    if different:
        table = Table("group", "rollout", "old", "new", title="changed")
        for row in different:
            table.add_row(str(row.group_index), str(row.rollout_id), _cell(row.old), _new_cell(row))
        console.print(table)


def summary(result: Rescoring) -> Table:
    """Counts, means and reasons."""
    table = Table(show_header=False, title="rescored")
    both = result.compared
    raised = sum(row.new > row.old for row in both if row.new is not None and row.old is not None)
    equal = sum(bool(row.agrees) for row in both)
    table.add_row("rollouts scored", str(sum(row.new is not None for row in result.rollouts)))
    if both:
        old, new = (statistics.fmean(getattr(row, name) for row in both) for name in ("old", "new"))
        table.add_row("mean reward, old -> new", f"{old:.4f} -> {new:.4f} (of {len(both)} with both)")
        changes = f"{raised} raised, {len(both) - equal - raised} lowered"
        table.add_row("agreement", f"{equal / len(both):.4f} ({equal} of {len(both)}; {changes})")
    anew = sum(row.old is None and row.new is not None for row in result.rollouts)
    if anew:
        table.add_row("without a reward before, scored now", str(anew))
    for title, reasons in (
        ("failed now", result.failures),
        ("no answer", result.invalid),
        ("left as they are", result.untouched),
    ):
        if reasons:
            table.add_row(title, _reasons(reasons))
    return table


def _cross_table(result: Rescoring) -> Table:
    """Counts of old against new rewards."""
    pairs = Counter((row.old, row.new) for row in result.compared)
    olds, news = ({pair[side] for pair in pairs} for side in (0, 1))
    columns = sorted(value for value in news if value is not None)
    table = Table("old \\ new", *map(_cell, columns), title="rewards")
    for old in sorted(value for value in olds if value is not None):
        table.add_row(_cell(old), *(str(pairs[old, new]) for new in columns))
    return table


def _reasons(reasons: Counter[str]) -> str:
    named = ", ".join(f"{reason} {count}" for reason, count in reasons.most_common())
    return f"{reasons.total()} ({named})"


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:g}"


def _new_cell(row: Rescored) -> str:
    return row.failure or _cell(row.new) + (f" ({row.invalid})" if row.invalid else "")


def _count(rest: dict[str, str], name: str, default: int) -> int:
    given = rest.get(name, str(default))
    if not given.isdecimal() or (name == "concurrency" and int(given) < 1):
        raise ConfigError(f"expects a whole number, got {given!r}", place=f"--{name}")
    return int(given)

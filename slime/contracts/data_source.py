"""Contracts of a data source class: groups with ids, groups taken back, and a position that survives a
restart.

Knows no engine. The source gets a small ``--prompt-data`` of its own where the user names none.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime.contracts.finding import broken
from slime.contracts.group_hooks import HookCase
from slime.errors import DataError
from slime.rollout.groups import flatten
from slime.utils.types import Sample

DEST = "data_source_path"
_SIZE = 2
_IDS = "count group_index and index up over the life of the run; rollout_id is the index, or unset"


@dataclass(frozen=True)
class SourceCase(HookCase):
    """A data source class on a stage."""

    def made(self, **values: Any) -> Any:
        """A fresh source; `values` are flags.

        Raises:
            NotApplicableError: the class does not load.
        """
        args = self.stage.args.with_values(
            n_samples_per_prompt=_SIZE, **{"save": None, "load": None, **values}
        )
        if not args.prompt_data:
            args = args.with_values(prompt_data=str(prompt_file(self.stage.folder)), label_key="label")
        return self.call(self.callable_hook, args)

    def groups(self, source: Any, count: int) -> list[Any]:
        """The next groups of a source."""
        groups: list[Any] = self.call(source.get_samples, count)
        return groups


def prompt_file(folder: Path) -> Path:
    """Eight questions as ``.jsonl``."""
    path = folder / "prompts.jsonl"
    rows = [{"input": f"What is {number} times 7?", "label": str(7 * number)} for number in range(8)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def takes_the_call(case: SourceCase) -> None:
    """The path names a class with __init__(args), get_samples, add_samples, save, load and __len__."""
    _ = case.hook


def knows_its_length(case: SourceCase) -> str:
    """len() is the number of prompts of an epoch, 0 where that is not known."""
    count = len(case.made())
    return f"{count} prompts"


def gives_groups(case: SourceCase) -> str:
    """get_samples(n) gives n groups, fewer only at the end; each is a list of --n-samples-per-prompt fresh
    Samples."""
    groups = case.groups(case.made(), 3)
    if not isinstance(groups, list) or len(groups) > 3 or not groups:
        found = f"{len(groups)} groups" if isinstance(groups, list) else type(groups).__name__
        raise broken("a list of 3 groups", found, "return a list of lists of Samples")
    for group in groups:
        rows = list(flatten(group)) if isinstance(group, list) else []
        if len(rows) != _SIZE or not all(isinstance(row, Sample) for row in rows):
            raise broken(
                f"groups of {_SIZE} Samples", f"{group!r:.60}", "a Sample for each rollout of the prompt"
            )
        if len({id(row) for row in rows}) < len(rows):
            raise broken("a Sample for each rollout", "the same object twice", "copy the prompt's Sample")
    return f"{len(groups)} groups"


def gives_ids_once(case: SourceCase) -> None:
    """group_index is one in a group and new in each; index and rollout_id are new for each sample, if set
    (law 2)."""
    source = case.made()
    groups = [*case.groups(source, 2), *case.groups(source, 2)]
    for group in groups:
        ids = {sample.group_index for sample in flatten(group)}
        if len(ids) > 1:
            raise broken("one group_index in a group", f"{sorted(map(str, ids))}", _IDS)
    for name in ("group_index", "index", "rollout_id"):
        of_groups = [[getattr(sample, name) for sample in flatten(group)] for group in groups]
        values = (
            [ids[0] for ids in of_groups]
            if name == "group_index"
            else [value for ids in of_groups for value in ids]
        )
        known = [value for value in values if value is not None]
        if len(set(known)) < len(known):
            raise broken(f"a new {name} each time", f"{known}", _IDS)


def takes_groups_back(case: SourceCase) -> str:
    """add_samples takes groups back, flat or nested, and gives each out again once; or refuses them with an
    error: nothing is lost silently (law 5)."""
    for nested in (False, True):
        source = case.made()
        groups = case.groups(source, 2)
        back = [[[sample] for sample in flatten(group)] for group in groups] if nested else groups
        wanted = sorted(str(sample.prompt) for group in groups for sample in flatten(group))
        try:
            case.call(source.add_samples, list(back))
        except (DataError, NotImplementedError) as error:
            return f"refuses: {error!s:.80}"
        again = case.groups(source, 2)
        found = sorted(str(sample.prompt) for group in again for sample in flatten(group))
        if found != wanted:
            raise broken(
                "the groups that were given back, first",
                f"other prompts: {found[:2]}",
                "keep a buffer for them",
            )
    return "flat and nested"


def goes_on_after_a_restart(case: SourceCase) -> None:
    """What a new source gives after load(n) is what the old one gave after save(n): same prompts, same
    ids."""
    folder = str(case.stage.folder / "state")
    source = case.made(save=folder, load=folder)
    case.groups(source, 2)
    case.call(source.save, 0)
    wanted = _said(case.groups(source, 2))
    resumed = case.made(save=folder, load=folder)
    case.call(resumed.load, 0)
    found = _said(case.groups(resumed, 2))
    if found != wanted:
        raise broken(
            f"{wanted[0]} after the restart",
            f"{found[0] if found else 'nothing'}",
            "save position, ids and buffer below args.save, and read them from args.load",
        )


CONTRACTS: tuple[Callable[[SourceCase], str | None], ...] = (
    takes_the_call,
    knows_its_length,
    gives_groups,
    gives_ids_once,
    takes_groups_back,
    goes_on_after_a_restart,
)


def _said(groups: list[Any]) -> list[str]:
    """Prompt and ids of each sample."""
    return [
        f"prompt {sample.prompt!r:.40} with group {sample.group_index}, index {sample.index}"
        for group in groups
        for sample in flatten(group)
    ]

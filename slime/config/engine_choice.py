"""Which engine a run has, and which programs' flags it may give: known before the flags are typed.

Invariant: a program is asked for its flags only where one of them is given, or where the engine is SGLang
and installed; so a run with the embedded engine starts no other interpreter. Knows names, not values.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime.config.flags import Flag
from slime.config.parse import flag_name, yaml_entries
from slime.config.passthrough import (
    PROGRAMS,
    ForeignTable,
    Program,
    installed_version,
    not_installed,
    own_router_table,
    table_of,
)
from slime.config.problem import Problem

if TYPE_CHECKING:
    from slime.config import Config

_CHOOSES_SGLANG = ("sglang-python", "sglang-config")
_NULL = "tag:yaml.org,2002:null"
_WITH_VALUE = ("sglang-python", "rollout-engine", "config")


@dataclass(frozen=True)
class ForeignFlags:
    """What programs add to the flag table of a run.

    Attributes:
        engine: ``embedded`` or ``sglang``: as given, or by default.
        own: names of slime's flags.
        in_run: whether engines serve a run, whose flags decide more.
    """

    engine: str
    tables: Mapping[Program, ForeignTable]
    own: frozenset[str]
    in_run: bool = True

    def usable(self) -> list[Flag]:
        """Flags that may be given; a name that slime has itself is slime's."""
        rows = [row for table in self.tables.values() for row in table.usable(in_run=self.in_run)]
        return [row for row in rows if row.name not in self.own]

    def refusals(self) -> dict[str, str]:
        """What to do instead of others, by name."""
        tables = [table.refusals(in_run=self.in_run) for table in self.tables.values()]
        return {name: text for table in tables for name, text in table.items()}

    def said(self, program: Program, values: Mapping[str, Any], said: Iterable[str]) -> dict[str, Any]:
        """Values that the user set, by the program's own names."""
        if program not in self.tables:
            return {}
        fields = self.tables[program].by_field
        return {field: values[row.dest] for field, row in fields.items() if row.dest in said}


def foreign_flags(argv: list[str], own: Iterable[Flag], *, in_run: bool = True) -> ForeignFlags:
    """Look at a command line and its ``--config`` file for flags of programs.

    Raises:
        ConfigError: one is given of SGLang, and that is not installed; or there is no such engine.
    """
    words, nulls = _mentioned(argv)
    rows = {row.name: row for row in own}
    names = frozenset(rows)
    foreign = {program: _first_of(program, words, names) for program in PROGRAMS}
    python, engine = words.get("sglang-python"), words.get("rollout-engine")
    if engine is not None:
        rows["rollout-engine"].check(engine, "--rollout-engine")
    else:
        chosen = foreign["sglang"] or any(name in words for name in _CHOOSES_SGLANG)
        engine = "sglang" if chosen or (gpu_present() and _installed_here()) else "embedded"
    named = {program: foreign[program] or _first_of(program, nulls, names) for program in PROGRAMS}
    wanted = [
        program
        for program in PROGRAMS
        if named[program] or (engine == "sglang" and installed_version(program, python) is not None)
    ]
    tables = {program: _table(program, engine, python, named[program]) for program in wanted}
    return ForeignFlags(engine, tables, names, in_run)


def engine_installed(config: Config, given: frozenset[str]) -> Iterator[Problem]:
    """Engines that the run is to start are there to be started."""
    serving = config.serving
    starts = not config.train_only and serving.rollout_external_engine_addrs is None
    is_sglang = starts and serving.rollout_engine == "sglang"
    if is_sglang and installed_version("sglang", serving.sglang_python) is None:
        error = not_installed("sglang", serving.sglang_python, "--rollout-engine")
        yield Problem("--rollout-engine", error.message, error.remedy or "")


def runs_stock_router(engine: str, python: str | None) -> bool:
    """Whether the router is sglang-router: it is installed where SGLang is. Else slime brings one.

    Args:
        python: --sglang-python; where it is given, embedded engines get its router too.
    """
    wanted = engine == "sglang" or python is not None
    return wanted and installed_version("router", python) is not None


def _table(program: Program, engine: str, python: str | None, given: str | None) -> ForeignTable:
    if program == "router" and not runs_stock_router(engine, python):
        return own_router_table()
    return table_of(program, python, asked_by=f"--{given}" if given else None)


def _first_of(program: Program, words: Iterable[str], own: frozenset[str]) -> str | None:
    """The first flag of a program among those that are given."""
    return next((word for word in words if word.startswith(f"{program}-") and word not in own), None)


def _mentioned(argv: list[str]) -> tuple[dict[str, str | None], list[str]]:
    """Names of the flags that are given, with the value of those that decide here; the command line wins.

    And names that a file gives as null: flags at their default.
    """
    found: dict[str, str | None] = {}
    for word, following in zip_longest(argv, argv[1:]):
        name, has_value, value = word.removeprefix("--").partition("=")
        if word.startswith("--"):
            found[name] = value if has_value else following if name in _WITH_VALUE else None
    config_file = found.get("config")
    if config_file is None:
        return found, []
    entries = [(flag_name(key), value) for key, value in yaml_entries(Path(config_file))]
    nulls = [name for name, value in entries if value.tag == _NULL]
    return {name: str(value.value) for name, value in entries if name not in nulls} | found, nulls


def _installed_here() -> bool:
    return importlib.util.find_spec("sglang") is not None


def gpu_present() -> bool:
    """Whether this process may use an NVIDIA GPU."""
    return os.environ.get("CUDA_VISIBLE_DEVICES") != "" and any(Path("/proc/driver/nvidia").glob("gpus/*"))
